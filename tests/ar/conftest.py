"""A running talker for tests of the autoregressive runtime: the tiny checkpoint of the family that has one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "models" / "qwen3-tts" / "tests"))


@pytest.fixture(scope="session")
def talker_checkpoint(tmp_path_factory):
    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("talker"), kind="custom-voice")
