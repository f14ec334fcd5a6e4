"""One plugin at a time: found (an entry point), compatible (its requirements hold), registered (its declarations read).

Every plugin gets a pluggy manager of its own. What it does wrong then stays its own: a declaration that raises, a hook
that nobody calls or a wrapper around a hook cannot reach another plugin, and one that fails half-way leaves nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pluggy

from omni_core.errors import PluginError, VersionMismatch
from omni_core.plugins import hookspecs
from omni_core.plugins.declarations import (
    AttentionBackend,
    Declaration,
    HttpRoutes,
    ModelFamily,
    Platform,
    Requirements,
)
from omni_core.plugins.versions import Installed, describe, find_mismatches, packaged_requirements

KINDS: Mapping[type[Declaration], str] = {
    ModelFamily: "model",
    Platform: "platform",
    AttentionBackend: "attention",
    HttpRoutes: "routes",
}
"""The word for each kind of declaration, in tables and messages."""

_HOOKS: Mapping[str, type[Declaration]] = {
    "omni_model_families": ModelFamily,
    "omni_platforms": Platform,
    "omni_attention_backends": AttentionBackend,
    "omni_http_routes": HttpRoutes,
}
_HEAVY = ("torch", "vllm", "transformers", "diffusers")


@dataclass(frozen=True, order=True)
class PluginEntry:
    """An entry point of the group ``omni_core.plugins`` and the distribution that it came with."""

    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} (entry point {self.name!r})"

    @property
    def installed(self) -> Installed:
        """The distribution with its version."""
        return Installed(self.distribution, self.version)


class PluginState(StrEnum):
    """How far a plugin got."""

    REGISTERED = "registered"
    INCOMPATIBLE = "incompatible"
    BROKEN = "broken"


@dataclass(frozen=True)
class PluginRecord:
    """A plugin that was found, and what became of it.

    Attributes:
        entry: where it came from.
        state: how far it got; only a ``REGISTERED`` plugin has declarations.
        reason: why it is broken or incompatible, on one line; for a registered one, the mismatch that was let through.
        traceback: of what it raised.
        requirements: what it asks for, once that could be read.
        declarations: what it contributes.
        heavy: modules that its import pulled in although finding plugins must stay cheap.
        hooks: its own pluggy manager.
    """

    entry: PluginEntry
    state: PluginState
    reason: str | None = None
    traceback: str | None = None
    requirements: Requirements | None = None
    declarations: tuple[Declaration, ...] = ()
    heavy: tuple[str, ...] = ()
    hooks: pluggy.PluginManager | None = field(default=None, repr=False, compare=False)

    @property
    def failed(self) -> bool:
        """Whether the plugin cannot be used."""
        return self.state is not PluginState.REGISTERED

    def error(self) -> PluginError:
        """What to raise where a plugin that failed is needed."""
        if self.state is PluginState.INCOMPATIBLE:
            return VersionMismatch(str(self.reason))
        return PluginError(f"plugin {self.entry} is broken: {self.reason}; 'omni plugins' shows the traceback")


def scan_entries() -> tuple[PluginEntry, ...]:
    """Every entry point of the group ``omni_core.plugins``, sorted, so that install order cannot matter."""
    found = set()
    for point in importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP):
        source = describe(point.dist)
        found.add(PluginEntry(point.name, point.value, source.distribution, source.version))
    return tuple(sorted(found))


def load_plugin(entry: PluginEntry, *, allow_version_mismatch: bool = False) -> PluginRecord:
    """Import a plugin, check its requirements, then read its declarations. Never raises for what the plugin does."""
    before = set(sys.modules)
    requirements = None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for what was asked for
            hooks = _register(entry)
        requirements = _read_requirements(hooks)
        mismatches = find_mismatches(requirements, entry.installed)
        reason = "; ".join(mismatches) or None
        heavy = tuple(name for name in _HEAVY if name in sys.modules and name not in before)
        if mismatches and not allow_version_mismatch:
            return PluginRecord(entry, PluginState.INCOMPATIBLE, reason, requirements=requirements, heavy=heavy)
        declarations = _read_declarations(hooks)
        return PluginRecord(
            entry, PluginState.REGISTERED, reason, None, requirements, declarations, heavy=heavy, hooks=hooks
        )
    except (Exception, SystemExit) as error:
        # Written for another core, a plugin may fail before it can say so: then its metadata tells what is wrong.
        mismatches = [] if allow_version_mismatch else _packaged_mismatches(entry)
        state = PluginState.INCOMPATIBLE if mismatches else PluginState.BROKEN
        reason = "; ".join(mismatches) or one_line(error)
        return PluginRecord(entry, state, reason, traceback.format_exc(), requirements)


def _packaged_mismatches(entry: PluginEntry) -> list[str]:
    try:
        return find_mismatches(packaged_requirements(entry.installed), entry.installed)
    except ValueError:  # the metadata is broken as well, and says nothing
        return []


def one_line(error: BaseException) -> str:
    """An exception as one line: its class and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _register(entry: PluginEntry) -> pluggy.PluginManager:
    plugin = importlib.metadata.EntryPoint(entry.name, entry.value, hookspecs.ENTRY_POINT_GROUP).load()
    hooks = pluggy.PluginManager(hookspecs.PROJECT)
    hooks.add_hookspecs(hookspecs)
    hooks.register(plugin, name=entry.name)
    hooks.check_pending()
    return hooks


def _read_requirements(hooks: pluggy.PluginManager) -> Requirements:
    answers = hooks.hook.omni_requirements()
    if len(answers) != 1 or not isinstance(answers[0], Requirements):
        given = ", ".join(type(a).__name__ for a in answers) or "nothing (is the hook there, marked with @hookimpl?)"
        raise TypeError(f"omni_requirements must give one Requirements, got {given}")
    return answers[0]


def _read_declarations(hooks: pluggy.PluginManager) -> tuple[Declaration, ...]:
    declarations: list[Declaration] = []
    for hook, kind in _HOOKS.items():
        for answer in getattr(hooks.hook, hook)():
            declarations += _checked(hook, kind, answer)
    names = [(KINDS[type(d)], d.name) for d in declarations]
    for kind_name, name in names:
        if names.count((kind_name, name)) > 1:
            raise ValueError(f"{kind_name} {name!r} is declared twice")
    return tuple(declarations)


def _checked(hook: str, kind: type[Declaration], answer: Any) -> list[Declaration]:
    items = list(answer) if isinstance(answer, Iterable) else [answer]
    if not isinstance(answer, Iterable) or not all(isinstance(item, kind) for item in items):
        given = ", ".join(type(item).__name__ for item in items)
        raise TypeError(f"{hook} must give an iterable of {kind.__name__}, got {given}")
    return items
