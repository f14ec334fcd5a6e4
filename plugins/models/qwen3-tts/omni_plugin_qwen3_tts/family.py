"""How a Qwen3-TTS checkpoint is served: not yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from omni_core.checkpoint import Checkpoint
from omni_core.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from omni_plugin_qwen3_tts.speech import Qwen3TTSSpeech

REASON = "Qwen3-TTS is recognised, and not served yet"


def pipeline(checkpoint: Checkpoint) -> NoReturn:
    """Raises ``UnsupportedCheckpoint``."""
    raise UnsupportedCheckpoint(f"{checkpoint}: {REASON}")


def request(checkpoint: Checkpoint) -> NoReturn:
    """Raises ``UnsupportedCheckpoint``."""
    raise UnsupportedCheckpoint(f"{checkpoint}: {REASON}")


def speech(checkpoint: Checkpoint) -> Qwen3TTSSpeech:
    """The front end's half; raises ``CheckpointError`` where it cannot be read."""
    from omni_plugin_qwen3_tts.speech import Qwen3TTSSpeech

    return Qwen3TTSSpeech.load(checkpoint)
