"""The table of first-party plugins: what to install for a checkpoint or a device that nothing installed handles."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omni_core.plugins.predicates import ConfigFiles, Key

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class KnownPlugin:
    """One row of ``entry_points.toml``.

    Attributes:
        kind: ``model``, ``platform``, ...
        name: the entry point's name, which is also the name of what it declares.
        distribution: what a package index calls it.
        entry_point: the entry point's value.
        folder: where it lives in this repository.
        install: the command that installs it.
        checkpoints: conditions of which one suffices for a checkpoint to be the plugin's.
        device_type: the torch device type that a platform is for.
    """

    kind: str
    name: str
    distribution: str
    entry_point: str
    folder: str
    install: str
    checkpoints: tuple[Key, ...] = ()
    device_type: str | None = None

    def handles(self, files: ConfigFiles) -> bool:
        """Whether a checkpoint is the plugin's, as far as the table knows."""
        return any(key.specificity(files) is not None for key in self.checkpoints)


def table_file() -> Path:
    """``entry_points.toml``: inside the package in a wheel, at the repository's root in a checkout."""
    shipped = _PACKAGE / "entry_points.toml"
    return shipped if shipped.is_file() else _PACKAGE.parent / "entry_points.toml"


@cache
def known_plugins() -> tuple[KnownPlugin, ...]:
    """Every row of the table, in its order."""
    with table_file().open("rb") as file:
        rows = tomllib.load(file)["plugin"]
    return tuple(_parse(row) for row in rows)


def _parse(row: Mapping[str, Any]) -> KnownPlugin:
    checkpoints = tuple(Key(c["key"], c["equals"], c["file"]) for c in row.get("checkpoints", ()))
    return KnownPlugin(**{**row, "checkpoints": checkpoints})


def install_command() -> str:
    """What installs the core with vLLM: one command for each platform, the user picks."""
    return " or: ".join(known.install for known in known_plugins() if known.kind == "platform")
