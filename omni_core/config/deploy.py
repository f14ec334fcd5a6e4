"""Reading what the user wrote outside the command line's flags: deploy files and ``--set stage.key=value``.

A deploy file is YAML::

    stages:
      diffusion:
        tensor_parallel_size: 2
    server:
      max_queued_requests: 16
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from omni_core.config.values import YamlLoader, parse_value, underscored, unknown
from omni_core.errors import ConfigError

SECTIONS = ("stages", "server")


@dataclass(frozen=True)
class Deploy:
    """A parsed deploy file: keys with underscores, values as YAML gave them.

    Attributes:
        name: what messages call it.
        stages: values by stage name and key.
        server: Omni's own server settings.
    """

    name: str = "no deploy file"
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)


class _UniqueKeys(YamlLoader):
    """YAML in which a key that is given twice is an error instead of the last one winning in silence."""


def _construct_mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    own = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key.start_mark)
        if own.count(key.value) > 1:
            message = f"the key {key.value!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
    loader.flatten_mapping(node)  # of "<<": what a mapping has itself stands after, and wins over, what it merges
    pairs = ((loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value)
    return dict(pairs)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def read_deploy(path: Path) -> Deploy:
    """Read a deploy file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an unknown section.
    """
    name = f"deploy file {path}"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ConfigError(f"{name} is not valid YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    sections = _mapping({} if content is None else content, name)
    for section in sections:
        if section not in SECTIONS:
            raise ConfigError(f"{name}: {unknown('key', section, SECTIONS)}")
    stages = _mapping(sections.get("stages") or {}, f"{name}: stages")
    return Deploy(
        name=name,
        stages={stage: _keys(values or {}, f"{name}: stages.{stage}") for stage, values in stages.items()},
        server=_keys(sections.get("server") or {}, f"{name}: server"),
    )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping of keys to values, got {value!r}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: keys must be strings, got {key!r}")
    return value


def _keys(value: Any, where: str) -> Mapping[str, Any]:
    result: dict[str, Any] = {}
    for key, item in _mapping(value, where).items():
        if underscored(key) in result:
            raise ConfigError(f"{where}: {key!r} is given twice, once with dashes and once with underscores")
        result[underscored(key)] = item
    return result


@dataclass(frozen=True)
class Override:
    """One value for one key of one stage, given by the user.

    Attributes:
        stage: the stage's name, not checked yet.
        key: the key, with underscores.
        value: the value.
        name: what messages and sources call it, such as ``--set diffusion.dtype``.
    """

    stage: str
    key: str
    value: Any
    name: str


def override_from_text(text: str) -> Override:
    """Parse the ``STAGE.KEY=VALUE`` of ``--set``.

    Raises:
        ConfigError: it has another form, or its value is not YAML.
    """
    target, equals, value = text.partition("=")
    name = f"--set {target}"
    if not equals or not _is_target(target):
        raise ConfigError(f"--set takes STAGE.KEY=VALUE, got {text!r}")
    return _override(target, parse_value(value, name), name)


def override_from_item(target: str, value: Any) -> Override:
    """An override of the Python API, ``overrides={"STAGE.KEY": value}``.

    Raises:
        ConfigError: the target has another form.
    """
    if not _is_target(target):
        raise ConfigError(f"overrides takes keys of the form 'STAGE.KEY', got {target!r}")
    return _override(target, value, f"overrides[{target!r}]")


def _is_target(target: str) -> bool:
    stage, _, key = target.partition(".")
    return bool(stage and key)


def _override(target: str, value: Any, name: str) -> Override:
    stage, _, key = target.partition(".")
    return Override(stage, underscored(key), value, name)


def check_stage(stage: str, stages: Iterable[str], where: str) -> None:
    """Raise ``ConfigError`` where the pipeline has no such stage."""
    known = list(stages)
    if stage not in known:
        raise ConfigError(f"{where}: {unknown('stage', stage, known)}")
