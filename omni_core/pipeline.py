"""A pipeline: the directed acyclic graph of stages that serves one checkpoint, declared by its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_core.plugins.declarations import check_name, check_reference


@dataclass(frozen=True)
class DiffusionStage:
    """A stage whose engine step is one denoising step of every running request.

    Attributes:
        name: the stage's name; configuration keys begin with it (``--set NAME.key=value``).
        model: ``"module:Class"``, a subclass of ``omni_core.diffusion.contract.DiffusionModel``.
        defaults: engine arguments that the family ships for this stage.
        options: the family's own options of this stage with their defaults; any of them can be set like an engine
            argument, and all reach ``StageContext.options``.
    """

    name: str
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = field(default="diffusion", init=False)

    def __post_init__(self) -> None:
        check_name(self, self.name)
        check_reference(self, model=self.model)


@dataclass(frozen=True)
class Pipeline:
    """The stages that serve a checkpoint. So far a pipeline has exactly one stage; edges come with the second."""

    stages: tuple[DiffusionStage, ...]

    def __post_init__(self) -> None:
        if len(self.stages) != 1:
            raise ValueError(f"this version of omni-core runs pipelines of one stage, got {len(self.stages)}")

    @property
    def stage(self) -> DiffusionStage:
        """The one stage."""
        return self.stages[0]
