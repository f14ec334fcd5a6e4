"""Fixtures: tiny checkpoints written once, models loaded once, reference pipelines fresh for each test."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
import wan22_support

for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}.items():
    os.environ.setdefault(name, value)

OPERATORS = wan22_support.define_torchvision_operators()


@pytest.fixture(scope="session")
def parallel():
    from omni_core.vllm.parallel import parallel_state

    torch.set_num_threads(1)
    with parallel_state() as config:
        yield config


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """A kind of checkpoint, and what else ``build_pipeline`` takes, to the folder where it was saved."""
    from omni_plugin_wan22.checkpoints import write_checkpoint

    @functools.cache
    def write(kind: str, **options) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp("wan") / kind, kind=kind, **options)

    return write


@pytest.fixture(scope="session")
def model_of(parallel, checkpoint_of):
    """What ``checkpoint_of`` takes, or a folder, to the loaded model."""

    @functools.cache
    def load(kind: str | Path, **options):
        from omni_core.diffusion.contract import StageContext
        from omni_plugin_wan22.model import WanModel

        folder = kind if isinstance(kind, Path) else checkpoint_of(kind, **options)
        return WanModel.load(StageContext(folder, torch.device("cpu"), torch.float32, wan22_support.sdpa))

    return load


@pytest.fixture(scope="session")
def parser_of(checkpoint_of):
    """What ``checkpoint_of`` takes, or a folder, to a function from fields to a request."""

    @functools.cache
    def build(kind: str | Path, **options):
        from omni_core.checkpoint import Checkpoint
        from omni_core.requests import parse_request
        from omni_plugin_wan22.request import request

        model = request(Checkpoint(kind if isinstance(kind, Path) else checkpoint_of(kind, **options)))
        return lambda **fields: parse_request(model, fields)

    return build


@pytest.fixture(scope="session")
def two_experts(checkpoint_of) -> Path:
    return checkpoint_of("t2v-a14b")


@pytest.fixture(scope="session")
def one_expert(checkpoint_of) -> Path:
    return checkpoint_of("t2v-2.1")


@pytest.fixture(scope="session")
def model(model_of):
    return model_of("t2v-a14b")


@pytest.fixture(scope="session")
def one_expert_model(model_of):
    return model_of("t2v-2.1")


@pytest.fixture
def reference():
    """The pipeline that was saved as ``two_experts``."""
    from omni_plugin_wan22.checkpoints import build_pipeline

    return build_pipeline()


@pytest.fixture
def one_expert_reference():
    from omni_plugin_wan22.checkpoints import build_pipeline

    return build_pipeline(experts=1)


@pytest.fixture(scope="session")
def parse(parser_of):
    """Fields to a request of the checkpoint with two experts."""
    return parser_of("t2v-a14b")


@pytest.fixture(scope="session")
def parse_one(parser_of):
    return parser_of("t2v-2.1")
