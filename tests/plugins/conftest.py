"""Fixtures: fresh interpreters with distributions of their own, and a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from plugin_site import Site

# On a busy machine the first example of a test may take long; that says nothing about the code.
settings.register_profile("omni", deadline=None)
settings.load_profile("omni")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An interpreter with omni-core and nothing else: no vLLM, no torch, no plugin."""
    return Site(tmp_path / "site")


@pytest.fixture
def other_site(tmp_path: Path) -> Site:
    """A second one."""
    return Site(tmp_path / "other")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of model type ``toy``."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy", "architectures": ["ToyModel"], "version": "2"}')
    return folder
