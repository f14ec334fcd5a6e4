"""omni-core: omni-modality models on stock vLLM, through plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from omni_core.api import AsyncOmni, Omni, Sound, SpeechOutput, VideoOutput

_API = ("AsyncOmni", "Omni", "Sound", "SpeechOutput", "VideoOutput")
__all__ = ["AsyncOmni", "Omni", "Sound", "SpeechOutput", "VideoOutput", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _API:
        from omni_core import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
