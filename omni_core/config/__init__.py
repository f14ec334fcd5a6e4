"""Configuration: resolved once, by one function, with a source for each value. Imports neither vLLM nor torch."""

from omni_core.config.model import (
    VLLM_DEFAULT,
    EngineArgument,
    EngineArguments,
    Resolved,
    ServerConfig,
    Setting,
    StageConfig,
)
from omni_core.config.resolve import Explicit, Served, as_argument, as_flag, resolve

__all__ = [
    "VLLM_DEFAULT",
    "EngineArgument",
    "EngineArguments",
    "Explicit",
    "Resolved",
    "Served",
    "ServerConfig",
    "Setting",
    "StageConfig",
    "as_argument",
    "as_flag",
    "resolve",
]
