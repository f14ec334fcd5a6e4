"""Omni's own server settings: names, types, bounds, and resolution (explicit, then deploy file, then default)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_core.config.deploy import Deploy
from omni_core.config.model import ServerConfig
from omni_core.config.values import check_value, unknown
from omni_core.errors import ConfigError

DEFAULT = "default"
"""The source of a server setting that nobody set."""

_TYPES: Mapping[str, Any] = {
    "max_queued_requests": int,
    "video_store": str | None,
    "video_ttl_seconds": int,
    "max_stored_videos": int,
    "voice_store": str | None,
    "max_stored_voices": int,
    "max_batch_items": int,
    "allow_routes": list[str],
}

ONLY_FOR: Mapping[str, tuple[str, ...]] = {
    "diffusion": ("video_store", "video_ttl_seconds", "max_stored_videos"),
    "talker": ("voice_store", "max_stored_voices", "max_batch_items"),
}
"""Settings that have a meaning for models with one kind of front stage only."""

Spelling = Callable[[str], str]
"""How messages and sources spell a name that was given explicitly: ``--max-queued-requests`` or the bare name."""


def resolve_server(explicit: Mapping[str, Any], deploy: Deploy, spell: Spelling) -> ServerConfig:
    """Resolve the server settings.

    Raises:
        ConfigError: an unknown name, a wrong type, a value out of range, or a folder that cannot be.
    """
    values: dict[str, Any] = {}
    sources = {field.name: DEFAULT for field in dataclasses.fields(ServerConfig) if field.name in _TYPES}
    layers = [(f"{deploy.name}: server.", deploy.server), ("", explicit)]
    for prefix, layer in layers:
        for name, value in layer.items():
            where = prefix + name if prefix else spell(name)
            if name not in _TYPES:
                hint = "" if not prefix else " (vLLM's own server flags go on the command line or into --config)"
                raise ConfigError(f"{prefix.removesuffix(' server.')} {unknown('server setting', name, _TYPES)}{hint}")
            if isinstance(value, Path):
                value = str(value)
            values[name] = check_value(value, _TYPES[name], where)
            sources[name] = deploy.name if prefix else where
    _check_bounds(values, sources)
    for name in ("video_store", "voice_store"):
        if values.get(name) is not None:
            values[name] = _store(name, values[name], sources[name])
    if "allow_routes" in values:
        values["allow_routes"] = tuple(dict.fromkeys(values["allow_routes"]))
    return ServerConfig(**values, sources=sources)


def has_meaning(name: str, kind: str) -> bool:
    """Whether a setting says anything to models with a front stage of ``kind``."""
    return not any(name in names for other, names in ONLY_FOR.items() if other != kind)


def check_meaning(server: ServerConfig, kind: str, family: str) -> None:
    """Raise ``ConfigError`` for a setting that somebody made and that has no meaning for a front stage of ``kind``."""
    for name, source in server.sources.items():
        if source != DEFAULT and not has_meaning(name, kind):
            what = "videos" if name in ONLY_FOR["diffusion"] else "speech"
            raise ConfigError(f"{source}: {name} is about {what}, which {family!r} does not make")


def server_settings() -> tuple[str, ...]:
    """The names of Omni's own server settings."""
    return tuple(_TYPES)


def _check_bounds(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    for name, value in values.items():
        if _TYPES[name] is int and value < 1:
            raise ConfigError(f"{sources[name]}: {name} must be at least 1, got {value}")


def _store(name: str, text: str, source: str) -> Path:
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{source}: {name} {text!r} is not a folder")
    if not path.exists() and not path.parent.is_dir():
        raise ConfigError(f"{source}: {name} {text!r}: there is no folder {str(path.parent)!r} to make it in")
    return path
