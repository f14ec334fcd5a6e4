"""The set of plugins that a process found, handed to its children, so that every process runs the same."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from omni_core.errors import PluginSetMismatch
from omni_core.plugins.hookspecs import ENTRY_POINT_GROUP
from omni_core.plugins.loading import PluginEntry
from omni_core.plugins.versions import describe

PLUGIN_SET_VARIABLE = "OMNI_PLUGIN_SET"
"""The environment variable in which a parent process hands its plugin set to its children."""


@dataclass(frozen=True)
class PluginSet:
    """What a child loads instead of scanning.

    Attributes:
        entries: the registered plugins.
        needed: those that what is served needs: one that fails to activate stops the process.
        allow_version_mismatch: whether the operator let version mismatches through.
    """

    entries: tuple[PluginEntry, ...]
    needed: frozenset[PluginEntry] = frozenset()
    allow_version_mismatch: bool = False

    def to_json(self) -> str:
        """The set as the value of ``OMNI_PLUGIN_SET``."""
        plugins = [{**asdict(entry), "needed": entry in self.needed} for entry in self.entries]
        return json.dumps({"plugins": plugins, "allow_version_mismatch": self.allow_version_mismatch})

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> PluginSet:
        """The set that the parent put into the environment.

        Raises:
            PluginSetMismatch: there is none, or it is malformed.
        """
        try:
            content = json.loads(environ[PLUGIN_SET_VARIABLE])
            rows = [(row.pop("needed"), PluginEntry(**row)) for row in content["plugins"]]
            allow = bool(content["allow_version_mismatch"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PluginSetMismatch(
                f"{PLUGIN_SET_VARIABLE} is missing or malformed ({error!r}); only Omni sets it, so unset it"
            ) from error
        return cls(tuple(entry for _, entry in rows), frozenset(entry for needed, entry in rows if needed), allow)

    def verify(self) -> None:
        """Check that this process would load what the parent did: same distributions, versions and entry points.

        Raises:
            PluginSetMismatch: naming the first difference.
        """
        for entry in self.entries:
            difference = _difference(entry)
            if difference:
                raise PluginSetMismatch(
                    f"this process sees another set of plugins than its parent: {difference}; "
                    "were packages installed or removed while Omni ran? Restart it"
                )


def _difference(entry: PluginEntry) -> str | None:
    try:
        found = importlib.metadata.distribution(entry.distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"the parent has {entry}, which is not installed here"
    version = describe(found).version
    if version != entry.version:
        return f"the parent has {entry}, here it is version {version}"
    points = found.entry_points.select(group=ENTRY_POINT_GROUP, name=entry.name)
    values = [point.value for point in points]
    if entry.value not in values:
        return f"the parent has {entry} = {entry.value!r}, here it is {', '.join(map(repr, values)) or 'not declared'}"
    return None
