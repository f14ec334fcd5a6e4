"""``--print-config``: every resolved value with its source, as text that is itself a deploy file, or as JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_core.config.model import Resolved, Setting, StageConfig
from omni_core.config.server import has_meaning

_COLUMN = 52


def to_text(resolved: Resolved) -> str:
    """YAML with a comment of the source behind each value. Read back as a deploy file it configures the same."""
    return "\n".join(_lines(resolved)) + "\n"


def to_json(resolved: Resolved) -> str:
    """The same as JSON: each setting is ``{"value": ..., "source": ...}``."""
    stages = {
        name: {
            "engine": {key: _pair(setting) for key, setting in stage.engine.items()},
            "options": {key: _pair(setting) for key, setting in stage.options.items()},
            **({"attention_backend": _pair(stage.attention_backend)} if stage.attention_backend else {}),
        }
        for name, stage in resolved.stages.items()
    }
    content = {
        "model": resolved.model,
        "revision": resolved.checkpoint.revision,
        "family": resolved.family.name,
        "platform": resolved.platform.name,
        "stages": stages,
        "server": {key: _pair(setting) for key, setting in _server_settings(resolved)},
        "warnings": list(resolved.warnings),
    }
    return json.dumps(content, indent=2) + "\n"


def _lines(resolved: Resolved) -> Iterator[str]:
    yield f"# model: {resolved.checkpoint}"
    yield f"# family: {resolved.family.name}"
    yield f"# platform: {resolved.platform.name}"
    yield from (f"# warning: {warning}" for warning in resolved.warnings)
    yield "stages:"
    for name, stage in resolved.stages.items():
        yield f"  {name}:"
        yield from (_line("    ", key, setting) for key, setting in _stage_settings(stage))
    yield "server:"
    yield from (_line("  ", key, setting) for key, setting in _server_settings(resolved))


def _stage_settings(stage: StageConfig) -> list[tuple[str, Setting]]:
    attention = [("attention_backend", stage.attention_backend)] if stage.attention_backend else []
    own = [*attention, *stage.options.items()]
    return sorted(stage.engine.items()) + own


def _server_settings(resolved: Resolved) -> list[tuple[str, Setting]]:
    """The settings that have a meaning for what is served."""
    server = resolved.server
    names = [name for name in server.sources if has_meaning(name, resolved.pipeline.stage.kind)]
    return [(name, Setting(getattr(server, name), server.sources[name])) for name in names]


def _line(indent: str, key: str, setting: Setting) -> str:
    value = yaml.safe_dump(plain(setting.value), default_flow_style=True, width=10**9, allow_unicode=True)
    line = f"{indent}{key}: " + value.removesuffix("...\n").strip()
    return f"{line.ljust(_COLUMN)} # {setting.source}"


def _pair(setting: Setting) -> Mapping[str, Any]:
    return {"value": plain(setting.value), "source": setting.source}


def plain(value: Any) -> Any:
    """A value as YAML and JSON have it; of a dataclass, the fields that differ from their defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in _changed(value).items()}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, Path) else repr(value)


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from those of a fresh one; all where none can be made without values."""
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    try:
        fresh = type(value)()
    except (TypeError, ValueError):
        return values
    return {name: item for name, item in values.items() if item != getattr(fresh, name)}
