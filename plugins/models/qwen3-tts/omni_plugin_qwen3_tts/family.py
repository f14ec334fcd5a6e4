"""How a Qwen3-TTS checkpoint is served: not yet."""

from __future__ import annotations

from typing import NoReturn

from omni_core.checkpoint import Checkpoint
from omni_core.errors import UnsupportedCheckpoint

REASON = "Qwen3-TTS is recognised, and not served yet"


def pipeline(checkpoint: Checkpoint) -> NoReturn:
    """Raises ``UnsupportedCheckpoint``."""
    raise UnsupportedCheckpoint(f"{checkpoint}: {REASON}")


def request(checkpoint: Checkpoint) -> NoReturn:
    """Raises ``UnsupportedCheckpoint``."""
    raise UnsupportedCheckpoint(f"{checkpoint}: {REASON}")
