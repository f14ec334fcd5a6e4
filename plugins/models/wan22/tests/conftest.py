"""Fixtures: tiny checkpoints written once, models loaded once, reference pipelines fresh for each test."""

from __future__ import annotations

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


def _write(folder: Path, **options) -> Path:
    from omni_plugin_wan22.checkpoints import write_checkpoint

    return write_checkpoint(folder, **options)


@pytest.fixture(scope="session")
def two_experts(tmp_path_factory) -> Path:
    return _write(tmp_path_factory.mktemp("wan") / "two-experts")


@pytest.fixture(scope="session")
def one_expert(tmp_path_factory) -> Path:
    return _write(tmp_path_factory.mktemp("wan") / "one-expert", experts=1)


def _load(folder: Path):
    from omni_core.diffusion.contract import StageContext
    from omni_plugin_wan22.model import WanModel

    return WanModel.load(StageContext(folder, torch.device("cpu"), torch.float32, wan22_support.sdpa))


@pytest.fixture(scope="session")
def model(parallel, two_experts):
    return _load(two_experts)


@pytest.fixture(scope="session")
def one_expert_model(parallel, one_expert):
    return _load(one_expert)


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
def parse(two_experts):
    """Fields to a request of the checkpoint with two experts."""
    from omni_core.checkpoint import Checkpoint
    from omni_core.requests import parse_request
    from omni_plugin_wan22.request import request

    kind = request(Checkpoint(two_experts))
    return lambda **fields: parse_request(kind, fields)


@pytest.fixture(scope="session")
def parse_one(one_expert):
    from omni_core.checkpoint import Checkpoint
    from omni_core.requests import parse_request
    from omni_plugin_wan22.request import request

    kind = request(Checkpoint(one_expert))
    return lambda **fields: parse_request(kind, fields)
