"""The plugins of this process: found, looked up by name, matched to checkpoints, activated.

``get_manager()`` is the one way in. The parent process scans entry points; its children load the set that it put into
their environment, and refuse to start if they would see another.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TypeVar

from omni_core.checkpoint import Checkpoint
from omni_core.errors import MissingPlugin, PluginError, PluginSetMismatch
from omni_core.plugins.activation import activate_once
from omni_core.plugins.declarations import AttentionBackend, Declaration, HttpRoutes, ModelFamily, Platform
from omni_core.plugins.loading import KINDS, PluginEntry, PluginRecord, load_plugin, one_line, scan_entries
from omni_core.plugins.matching import Explanation, duplicate_error, explain, find_known
from omni_core.plugins.snapshot import PLUGIN_SET_VARIABLE, PluginSet
from omni_core.plugins.table import known_plugins

logger = logging.getLogger(__name__)

__all__ = ["PLUGIN_SET_VARIABLE", "PluginManager", "get_manager", "in_omni_process"]

D = TypeVar("D", ModelFamily, Platform, AttentionBackend, HttpRoutes)


class PluginManager:
    """Every plugin that was found, with its state; a plugin that failed is an error only where it is needed.

    Attributes:
        records: one for each entry point, sorted.
        allow_version_mismatch: whether version mismatches are let through.
    """

    def __init__(
        self,
        records: Iterable[PluginRecord],
        *,
        allow_version_mismatch: bool = False,
        required: Iterable[PluginEntry] = (),
    ) -> None:
        self.records = tuple(sorted(records, key=lambda record: record.entry))
        self.allow_version_mismatch = allow_version_mismatch
        self._required = set(required)

    @classmethod
    def scan(cls, *, allow_version_mismatch: bool = False) -> PluginManager:
        """Find and load every installed plugin. Never raises for what a plugin does."""
        records = [load_plugin(e, allow_version_mismatch=allow_version_mismatch) for e in scan_entries()]
        return cls(records, allow_version_mismatch=allow_version_mismatch)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> PluginManager:
        """Load exactly the set of plugins that the parent process put into the environment, without scanning.

        Raises:
            PluginSetMismatch: this process would see another set, or a plugin fails here that did not in the parent.
        """
        handed = PluginSet.from_environment(environ)
        handed.verify()
        records = [load_plugin(e, allow_version_mismatch=handed.allow_version_mismatch) for e in handed.entries]
        for record in records:
            if record.failed:
                raise PluginSetMismatch(
                    f"plugin {record.entry} loads in the parent process but not here: {record.reason}"
                )
        return cls(records, allow_version_mismatch=handed.allow_version_mismatch, required=handed.needed)

    @property
    def plugin_set(self) -> PluginSet:
        """The registered plugins, for child processes, and which of them are required."""
        entries = tuple(record.entry for record in self.records if not record.failed)
        return PluginSet(entries, frozenset(self._required), self.allow_version_mismatch)

    def require(self, *declarations: Declaration) -> None:
        """Say what is being served: here and in children, its plugins have to activate.

        Raises:
            PluginError: a declaration is of no plugin of this process.
        """
        self._required |= {self.provider(declaration).entry for declaration in declarations}

    # Lookups

    def declared(self, kind: type[D]) -> tuple[D, ...]:
        """Everything of one kind, such as ``ModelFamily``, sorted by name."""
        found = (d for record in self.records for d in record.declarations if isinstance(d, kind))
        return tuple(sorted(found, key=lambda declaration: declaration.name))

    def family(self, name: str) -> ModelFamily:
        """The model family of that name.

        Raises:
            MissingPlugin: there is none; the message has the command that installs it, or the nearest name.
            PluginError: its plugin is broken or incompatible, or two distributions declare the name.
        """
        return self._by_name(ModelFamily, name)

    def platform(self, device_type: str) -> Platform:
        """The platform for a torch device type; raises what ``family`` raises."""
        found = [platform for platform in self.declared(Platform) if platform.device_type == device_type]
        if len({platform.name for platform in found}) > 1:
            entries = [self.provider(platform).entry for platform in found]
            raise duplicate_error("platform for device type", device_type, entries)
        if found:
            return self._by_name(Platform, found[0].name)
        for known in known_plugins():
            if known.device_type == device_type:
                self._explain_absent(known.kind, known.name)
        have = sorted(platform.device_type for platform in self.declared(Platform))
        raise MissingPlugin(
            f"no installed plugin supports the device type {device_type!r}; installed: {', '.join(have) or 'none'}"
            + self._failures()
        )

    def attention_backend(self, name: str, device_type: str) -> AttentionBackend:
        """The attention backend of that name for a torch device type; raises what ``family`` raises.

        Distributions may share a name for different device types.
        """
        named = [backend for backend in self.declared(AttentionBackend) if backend.name == name]
        found = [backend for backend in named if device_type in backend.device_types]
        if len(found) > 1:
            raise duplicate_error("attention", name, [self.provider(backend).entry for backend in found])
        if named and not found:
            runs_on = ", ".join(sorted({device for backend in named for device in backend.device_types}))
            raise PluginError(f"attention {name!r} runs on {runs_on}, not on {device_type}")
        return found[0] if found else self._by_name(AttentionBackend, name)

    def http_routes(self, name: str) -> HttpRoutes:
        """The extra HTTP routes of that name; raises what ``family`` raises."""
        return self._by_name(HttpRoutes, name)

    def provider(self, declaration: Declaration) -> PluginRecord:
        """The plugin that declares ``declaration``.

        Raises:
            PluginError: none of this process does.
        """
        for record in self.records:
            if any(declaration is own for own in record.declarations):
                return record
        raise PluginError(f"{KINDS[type(declaration)]} {declaration.name!r} is of no plugin of this process")

    # Checkpoints

    def explain(self, checkpoint: Checkpoint) -> Explanation:
        """Every family before a checkpoint, with why it serves it or does not.

        Raises:
            CheckpointError: the checkpoint cannot be found or read.
        """
        return explain(self.records, checkpoint)

    def match(self, checkpoint: Checkpoint) -> ModelFamily:
        """The family that serves a checkpoint: the most specific one that claims it.

        Raises:
            MissingPlugin: none does; for a known plugin that is not installed, with the command that installs it.
            PluginError: two claim it equally or under one name, or the plugin for it is broken or incompatible.
            CheckpointError: the checkpoint cannot be found or read.
        """
        explanation = self.explain(checkpoint)
        if explanation.family is None:
            raise explanation.error or MissingPlugin(f"no installed plugin serves checkpoint {checkpoint}")
        return explanation.family

    # Activation

    def activate(self) -> None:
        """Run every plugin's ``omni_activate``, once per process. A failure is a warning unless the plugin is required.

        Raises:
            PluginError: the activation of a required plugin raised.
        """
        outcomes = [(record, activate_once(record)) for record in self.records if not record.failed]
        for record, error in outcomes:
            if error is None:
                continue
            message = f"plugin {record.entry} failed to activate in process {os.getpid()}: {one_line(error)}"
            if record.entry in self._required:
                raise PluginError(message) from error
            logger.warning("%s; nothing here needs it", message, exc_info=error)

    # Health

    def problems(self) -> list[str]:
        """One line for each thing that is wrong, whether or not anything needs it."""
        lines = [str(record.error()) for record in self.records if record.failed]
        for kind, word in KINDS.items():
            if kind is AttentionBackend:
                continue
            for name in sorted({d.name for r in self.records for d in r.declarations if type(d) is kind}):
                entries = self._declaring(kind, name)
                lines += [str(duplicate_error(word, name, entries))] if len(entries) > 1 else []
        for device_type in sorted({platform.device_type for platform in self.declared(Platform)}):
            try:
                self.platform(device_type)
            except PluginError as error:
                lines += [] if str(error) in lines else [str(error)]
        backends = self.declared(AttentionBackend)
        for name, device_type in sorted({(b.name, device) for b in backends for device in b.device_types}):
            try:
                self.attention_backend(name, device_type)
            except PluginError as error:
                lines += [] if str(error) in lines else [str(error)]
        lines += [
            f"plugin {record.entry} imports {', '.join(record.heavy)} when it is found; "
            "name what needs such modules as 'module:attribute' instead"
            for record in self.records
            if record.heavy
        ]
        return lines

    def _declaring(self, kind: type[Declaration], name: str) -> list[PluginEntry]:
        return [r.entry for r in self.records for d in r.declarations if type(d) is kind and d.name == name]

    def _by_name(self, kind: type[D], name: str) -> D:
        entries = self._declaring(kind, name)
        if len(entries) > 1:
            raise duplicate_error(KINDS[kind], name, entries)
        for declaration in self.declared(kind):
            if declaration.name == name:
                return declaration
        self._explain_absent(KINDS[kind], name)
        names = [declaration.name for declaration in self.declared(kind)]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise MissingPlugin(
            f"there is no {KINDS[kind]} {name!r}{hint} installed: {', '.join(names) or 'none'}" + self._failures()
        )

    def _explain_absent(self, kind: str, name: str) -> None:
        """Raise what the table of first-party plugins, or a plugin that failed, has to say about a name."""
        for known in known_plugins():
            if (known.kind, known.name) == (kind, name):
                record = find_known(self.records, known)
                if record is None:
                    raise MissingPlugin(f"{kind} {name!r} is not installed; run: {known.install}")
                if record.failed:
                    raise record.error()
        for record in self.records:
            if record.failed and record.entry.name == name:
                raise record.error()

    def _failures(self) -> str:
        failed = ", ".join(str(record.entry) for record in self.records if record.failed)
        return f"; broken or incompatible: {failed}" if failed else ""


_lock = threading.Lock()
_manager: PluginManager | None = None


def get_manager(*, allow_version_mismatch: bool | None = None) -> PluginManager:
    """The plugins of this process: from the environment in a child of Omni, else by scanning once.

    ``allow_version_mismatch``: let mismatches through; ``None`` leaves it as it is (at first, not). A child does as its
    parent did.

    Raises:
        PluginSetMismatch: in a child that would see other plugins than its parent.
    """
    global _manager
    with _lock:
        if PLUGIN_SET_VARIABLE in os.environ:
            _manager = _manager or PluginManager.from_environment()
        elif _manager is None or allow_version_mismatch not in (None, _manager.allow_version_mismatch):
            _manager = PluginManager.scan(allow_version_mismatch=bool(allow_version_mismatch))
        return _manager


def in_omni_process() -> bool:
    """Whether this process is Omni's: one that Omni started, or one that has asked for Omni's plugins.

    For what vLLM calls in every process, and what has to do nothing in a plain one.
    """
    return _manager is not None or PLUGIN_SET_VARIABLE in os.environ
