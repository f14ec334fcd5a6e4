"""A pipeline: the directed acyclic graph of stages that serves one checkpoint, declared by its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
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
class TalkerStage:
    """An autoregressive stage whose step is a frame of codes of every running request.

    Attributes:
        name: as in ``DiffusionStage``; ``defaults`` and ``options`` too, but that options reach nobody yet.
        config: ``"module:function"``, from the checkpoint's transformers configuration to that of the talker, whose
            ``architectures`` name a class that the family registers with vLLM in ``omni_activate``: a
            ``omni_core.vllm.ar.state.TalkerMixin``.
        defaults: engine arguments that the family ships for this stage.
    """

    name: str
    config: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict, init=False)
    kind: str = field(default="talker", init=False)

    def __post_init__(self) -> None:
        check_name(self, self.name)
        check_reference(self, config=self.config)


@dataclass(frozen=True)
class ModuleStage:
    """A stage that is a plain network in a process of its own.

    Attributes:
        name: as in ``DiffusionStage``; ``defaults`` and ``options`` too, which reach ``ModuleContext.options``.
        module: ``"module:Class"``, a subclass of ``omni_core.module.contract.StageModule``.
    """

    name: str
    module: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = field(default="module", init=False)

    def __post_init__(self) -> None:
        check_name(self, self.name)
        check_reference(self, module=self.module)


Stage = DiffusionStage | TalkerStage | ModuleStage


@dataclass(frozen=True)
class Edge:
    """What flows from one stage to another.

    Attributes:
        source: name of the stage that makes it.
        target: name of the stage that takes it.
        carries: what it is, such as ``codes``.
        streams: whether it flows while it is made.
    """

    source: str
    target: str
    carries: str
    streams: bool = False


@dataclass(frozen=True)
class Pipeline:
    """The stages that serve a checkpoint, the front one first, and what flows between them.

    Raises:
        ValueError: there is no stage, two have one name, an edge names none, or the edges go in a circle.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a pipeline needs stages with names of their own, got {names}")
        graph: dict[str, set[str]] = {name: set() for name in names}
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in graph:
                    raise ValueError(f"an edge names the stage {end!r}; there are {', '.join(names)}")
            graph[edge.target].add(edge.source)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            raise ValueError(f"the edges go in a circle: {' -> '.join(error.args[1])}") from None

    @property
    def stage(self) -> Stage:
        """The front stage, to which arguments go that name none."""
        return self.stages[0]
