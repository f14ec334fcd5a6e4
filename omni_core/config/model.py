"""What configuration resolves to: frozen dataclasses in which every value says where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_core.plugins.declarations import ModelFamily, Platform

if TYPE_CHECKING:
    from omni_core.checkpoint import Checkpoint
    from omni_core.pipeline import Pipeline, Stage

VLLM_DEFAULT = "vLLM default"
"""The source of a value that nobody set."""


@dataclass(frozen=True)
class EngineArgument:
    """One engine argument of the installed vLLM, as configuration sees it.

    Attributes:
        name: the field's name in vLLM's ``AsyncEngineArgs``.
        default: its default.
        annotation: its type, as far as vLLM declares it; ``Any`` is not checked.
    """

    name: str
    default: Any = None
    annotation: Any = Any


EngineArguments = Mapping[str, EngineArgument]
"""Engine arguments by name: ``omni_core.vllm.arguments.engine_arguments()``, or a few made up in a test."""


@dataclass(frozen=True)
class Setting:
    """A value and where it came from, such as ``--dtype``, ``deploy file a.yaml`` or ``vLLM default``."""

    value: Any
    source: str


@dataclass(frozen=True)
class StageConfig:
    """The resolved configuration of one stage.

    Attributes:
        stage: the stage as its family declared it.
        engine: every engine argument that has a meaning for this kind of stage.
        options: the family's own options of the stage.
        attention_backend: of a diffusion stage, the name of the attention that the user chose, or ``None`` for the
            platform's own.
    """

    stage: Stage
    engine: Mapping[str, Setting]
    options: Mapping[str, Setting]
    attention_backend: Setting | None = None


@dataclass(frozen=True)
class ServerConfig:
    """Omni's own settings of the server. vLLM's (host, port, keys, certificates ...) stay in its argument namespace.

    Attributes:
        max_queued_requests: how many requests may wait; beyond it the answer is 429.
        video_store: folder of finished videos; ``None`` means a private temporary folder that goes with the server.
            A folder of one's own outlives the server; two servers must not share one.
        video_ttl_seconds: how long a finished video is kept.
        max_stored_videos: how many finished videos are kept; the oldest goes first.
        voice_store: folder of uploaded voices; ``None`` means a private temporary folder that goes with the server.
            A folder of one's own outlives the server; two servers must not share one.
        max_stored_voices: how many uploaded voices are kept; beyond it an upload is refused.
        max_batch_items: how many items a batch of speech may have.
        allow_routes: names of the plugin HTTP routes that the operator allows.
        sources: where each of the above came from.
    """

    max_queued_requests: int = 64
    video_store: Path | None = None
    video_ttl_seconds: int = 3600
    max_stored_videos: int = 100
    voice_store: Path | None = None
    max_stored_voices: int = 1000
    max_batch_items: int = 32
    allow_routes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Resolved:
    """Everything that is needed to start serving.

    Attributes:
        model: the model as the user named it.
        checkpoint: the checkpoint that it names.
        family: the family that serves it.
        platform: the platform that it runs on.
        pipeline: the family's pipeline for this checkpoint.
        stages: configuration by stage name.
        server: Omni's own server settings.
        warnings: lines to show the user once, such as an untested combination of features.
    """

    model: str
    checkpoint: Checkpoint
    family: ModelFamily
    platform: Platform
    pipeline: Pipeline
    stages: Mapping[str, StageConfig]
    server: ServerConfig
    warnings: tuple[str, ...] = ()

    @property
    def stage(self) -> StageConfig:
        """The front stage's."""
        return self.stages[self.pipeline.stage.name]
