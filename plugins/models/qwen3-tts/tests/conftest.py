"""Fixtures: tiny checkpoints, each written once, and the golden files."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """A kind and a size of checkpoint to the folder where it was written."""
    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint

    @functools.cache
    def write(kind: str, size_name: str = "tiny") -> Path:
        folder = tmp_path_factory.mktemp("qwen3-tts") / f"{kind}-{size_name}"
        return write_checkpoint(folder, kind=kind, size_name=size_name)

    return write


@pytest.fixture(scope="session")
def golden():
    """The name of a golden JSON file, without its ending, to what it says."""
    return functools.cache(lambda name: json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def golden_tensors():
    """The name of a golden file of tensors, without its ending, to its tensors."""
    from safetensors.torch import load_file

    return functools.cache(lambda name: load_file(GOLDEN / f"{name}.safetensors"))
