"""The one resolution of configuration, for the command line and the Python API alike.

From the strongest layer to the weakest:

1. explicit: a flag, a keyword argument of the Python API, or ``--set stage.key=value``;
2. the deploy file;
3. what the family ships for the stage (``DiffusionStage.defaults`` and ``options``);
4. what the platform ships for the kind of stage (``Platform.stage_defaults``);
5. the core's default for the kind of stage, where vLLM's suits token models only;
6. vLLM's default.

The family stands above the platform since it knows the model: a platform suits any model, a family its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_core.checkpoint import Checkpoint
from omni_core.config import arguments_table as table
from omni_core.config.deploy import Deploy, Override, check_stage
from omni_core.config.features import check_features, enabled_features
from omni_core.config.model import VLLM_DEFAULT, EngineArgument, EngineArguments, Resolved, Setting, StageConfig
from omni_core.config.server import Spelling, check_meaning, resolve_server
from omni_core.config.values import check_value, unknown
from omni_core.errors import ConfigError, PluginError
from omni_core.pipeline import Pipeline, Stage
from omni_core.plugins.declarations import ModelFamily, Platform


def as_flag(name: str) -> str:
    """The spelling of the command line: ``--tensor-parallel-size``."""
    return "--" + name.replace("_", "-")


def as_argument(name: str) -> str:
    """The spelling of the Python API: ``tensor_parallel_size=``."""
    return f"{name}="


@dataclass(frozen=True)
class Served:
    """What startup found out about a checkpoint before any setting is looked at."""

    checkpoint: Checkpoint
    family: ModelFamily
    platform: Platform
    pipeline: Pipeline


@dataclass(frozen=True)
class Explicit:
    """What the user asked for beside the model.

    Attributes:
        arguments: vLLM's arguments that were given explicitly, engine and server alike, by name.
        overrides: values for single keys of a stage (``--set STAGE.KEY=VALUE``).
        deploy: the deploy file, see ``read_deploy``.
        server: Omni's own server settings.
        spell: how messages and sources spell the names in ``arguments`` and ``server``.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[Override] = ()
    deploy: Deploy = field(default_factory=Deploy)
    server: Mapping[str, Any] = field(default_factory=dict)
    spell: Spelling = as_flag


def _take_any(name: str) -> None:
    """Whatever is named is there."""


def check_stages(explicit: Explicit, pipeline: Pipeline) -> None:
    """Check that every stage that the user names is one of the pipeline's; needs nothing of vLLM.

    Raises:
        ConfigError: naming the stage and the nearest one.
    """
    names = [stage.name for stage in pipeline.stages]
    for name in explicit.deploy.stages:
        check_stage(name, names, f"{explicit.deploy.name}: stages")
    for override in explicit.overrides:
        check_stage(override.stage, names, override.name)


def resolve(
    served: Served,
    explicit: Explicit,
    engine_arguments: EngineArguments,
    *,
    require_attention: Callable[[str], object] = _take_any,
    require_routes: Callable[[str], object] = _take_any,
) -> Resolved:
    """Resolve everything that serving needs.

    Args:
        served: the checkpoint and what serves it.
        explicit: what the user asked for.
        engine_arguments: the installed vLLM's.
        require_attention: called with the name of the attention backend that the user chose; raises ``OmniError``
            where the platform cannot use it.
        require_routes: called with the name of each set of plugin HTTP routes that the operator allowed; likewise.

    Raises:
        ConfigError: a key, value, flag or combination of features is wrong; names it and its source.
        PluginError: what the family or the platform ships is wrong.
    """
    stages = {stage.name: stage for stage in served.pipeline.stages}
    check_stages(explicit, served.pipeline)
    configs: dict[str, StageConfig] = {}
    warnings: list[str] = []
    for name, stage in stages.items():
        resolver = _StageResolver(stage, stage is served.pipeline.stage, served, engine_arguments)
        own = [override for override in explicit.overrides if override.stage == name]
        configs[name] = config = resolver.resolve(explicit, own)
        _check_together(config.engine)
        if config.attention_backend is not None and config.attention_backend.value is not None:
            require_attention(config.attention_backend.value)
        if stage is served.pipeline.stage:
            warnings += check_features(served.family, enabled_features(config.engine))
    server = resolve_server(explicit.server, explicit.deploy, explicit.spell)
    check_meaning(server, served.pipeline.stage.kind, served.family.name)
    for name in server.allow_routes:
        require_routes(name)
    return Resolved(
        model=served.checkpoint.source,
        checkpoint=served.checkpoint,
        family=served.family,
        platform=served.platform,
        pipeline=served.pipeline,
        stages=configs,
        server=server,
        warnings=tuple(warnings),
    )


def _check_together(engine: Mapping[str, Setting]) -> None:
    """Raise ``ConfigError`` for settings of which vLLM would follow one and leave the other."""
    devices, backend = engine.get("device_ids"), engine.get("distributed_executor_backend")
    if devices and backend and devices.value and backend.value == "ray":
        raise ConfigError(
            f"device_ids ({devices.source}) has no effect with Ray ({backend.source}); use Ray's placement groups"
        )


@dataclass(frozen=True)
class _Entry:
    """One key in one layer.

    Attributes:
        key: the key.
        value: its value.
        where: where it stands, for messages.
        source: the source of the setting that it makes.
        is_flag: whether the key is a whole argument of vLLM's, not a key of a stage.
    """

    key: str
    value: Any
    where: str
    source: str
    is_flag: bool = False


class _StageResolver:
    """Resolution of one stage."""

    def __init__(self, stage: Stage, front: bool, served: Served, engine_arguments: EngineArguments) -> None:
        self.stage, self.front = stage, front
        self.family, self.platform = served.family, served.platform
        self.label = f"the {stage.kind} stage {stage.name!r}"
        self.engine_arguments = engine_arguments
        self.allowed = _allowed(stage.kind, engine_arguments)
        self.own_attention = stage.kind == "diffusion"
        clash = sorted(set(stage.options) & (set(engine_arguments) | {table.ATTENTION_BACKEND}))
        if clash:
            raise PluginError(
                f"family {self.family.name!r}: the option {clash[0]!r} of {self.label} has the name of an engine "
                "argument"
            )

    def resolve(self, explicit: Explicit, overrides: list[Override]) -> StageConfig:
        found: dict[str, Setting] = {}
        for entry in self._shipped():
            try:
                self._put(found, entry)
            except ConfigError as error:
                raise PluginError(str(error)) from None
        for entry in self._from_deploy(explicit.deploy):
            self._put(found, entry)
        top: dict[str, Setting] = {}
        for entry in self._explicit(explicit, overrides):
            before = top.get(entry.key)
            self._put(top, entry)
            if before is not None and before.source != entry.source and before.value != top[entry.key].value:
                raise ConfigError(
                    f"{before.source} says {before.value!r} and {entry.source} says {entry.value!r}; give one of them"
                )
        found |= top
        return StageConfig(
            stage=self.stage,
            engine={name: found.get(name, Setting(a.default, VLLM_DEFAULT)) for name, a in self.allowed.items()},
            options={name: found[name] for name in self.stage.options},
            attention_backend=found.get(table.ATTENTION_BACKEND, Setting(None, f"platform {self.platform.name}"))
            if self.own_attention
            else None,
        )

    def _shipped(self) -> Iterator[_Entry]:
        """The core's own first, then the platform's: what comes later wins."""
        defaults = table.DEFAULTS.get(self.stage.kind, {})
        for key in defaults.keys() & self.allowed.keys():
            yield _Entry(key, defaults[key], f"omni default of {key}", "omni default")
        platform, family = f"platform {self.platform.name}", f"family {self.family.name}"
        for key, value in self.platform.stage_defaults.get(self.stage.kind, {}).items():
            yield _Entry(key, value, f"{platform}: stage_defaults[{self.stage.kind!r}].{key}", platform)
        for key, value in {**self.stage.options, **self.stage.defaults}.items():
            yield _Entry(key, value, f"{family}: {self.label}: {key}", family)

    def _from_deploy(self, deploy: Deploy) -> Iterator[_Entry]:
        for key, value in deploy.stages.get(self.stage.name, {}).items():
            yield _Entry(key, value, f"{deploy.name}: stages.{self.stage.name}.{key}", deploy.name)

    def _explicit(self, explicit: Explicit, overrides: list[Override]) -> Iterator[_Entry]:
        for name, value in explicit.arguments.items() if self.front else ():
            if name not in table.CHECKPOINT and name not in table.SERVER:
                yield _Entry(name, value, explicit.spell(name), explicit.spell(name), is_flag=True)
        for override in overrides:
            yield _Entry(override.key, override.value, override.name, override.name)

    def _put(self, found: dict[str, Setting], entry: _Entry) -> None:
        """Check one entry and let it win over what was found so far."""
        key = entry.key
        if key in self.stage.options:
            default = self.stage.options[key]
            annotation = Any if default is None else type(default)
            value = check_value(entry.value, annotation, entry.where, default)
        elif key == table.ATTENTION_BACKEND and self.own_attention:
            value = check_value(entry.value, str | None, entry.where)
        elif key in self.allowed:
            argument = self.allowed[key]
            value = check_value(entry.value, argument.annotation, entry.where, argument.default)
        else:
            self._refuse(entry)
            return
        found[key] = Setting(value, entry.source)

    def _refuse(self, entry: _Entry) -> None:
        """Raise for an argument outside the allowed ones, unless it asks for what is done anyway."""
        known_to_vllm = entry.key in self.engine_arguments or entry.key in table.fixed_for(self.stage.kind)
        if not (known_to_vllm and self.stage.kind != "module") and not entry.is_flag:
            keys = [*self.allowed, *self.stage.options, *([table.ATTENTION_BACKEND] if self.own_attention else [])]
            raise ConfigError(f"{entry.where}: {unknown('key', entry.key, keys)}")
        reason = table.refusal(entry.key, entry.where, self.label, entry.value, self.stage.kind)
        if reason is not None:
            raise ConfigError(reason)


def _allowed(kind: str, engine_arguments: EngineArguments) -> dict[str, EngineArgument]:
    """The arguments that have a meaning for a kind of stage."""
    if kind == "module":
        return {name: EngineArgument(name, default, type_) for name, (default, type_) in table.MODULE.items()}
    names = {"diffusion": table.DIFFUSION, "talker": table.TALKER}[kind]
    return {name: argument for name, argument in engine_arguments.items() if name in names}
