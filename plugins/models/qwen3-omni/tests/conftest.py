"""Fixtures: tiny checkpoints, each written once, the golden files, and the reference."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory):
    """A size of checkpoint to the folder where it was written."""
    from omni_plugin_qwen3_omni.checkpoints import write_checkpoint

    @functools.cache
    def write(size_name: str = "tiny") -> Path:
        return write_checkpoint(tmp_path_factory.mktemp("qwen3-omni") / size_name, size_name=size_name)

    return write


@pytest.fixture(scope="session")
def golden():
    """The name of a golden JSON file, without its ending, to what it says."""
    return functools.cache(lambda name: json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def golden_tensors():
    """The name of a case to its golden tensors."""
    from safetensors.torch import load_file

    return functools.cache(lambda name: load_file(GOLDEN / f"{name}.safetensors"))


@pytest.fixture(scope="session")
def reference(checkpoint_of):
    """transformers' model of the tiny checkpoint, and what it is given and gives."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("qwen3_omni_make_golden", GOLDEN / "make_golden.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Reference(checkpoint_of("tiny"))
