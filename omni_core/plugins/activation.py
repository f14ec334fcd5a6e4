"""Activation: each plugin's ``omni_activate``, once in every process, a forked child included."""

from __future__ import annotations

import os
import threading

from omni_core.plugins.loading import PluginEntry, PluginRecord


class _Guard:
    """What was activated in one process. A forked child inherits the parent's and replaces it, lock and all."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.outcomes: dict[PluginEntry, BaseException | None] = {}


_guard = _Guard()


def activate_once(record: PluginRecord) -> BaseException | None:
    """Call the plugin's ``omni_activate`` unless this process already did; what it raised, then or now.

    A plugin whose activation asks for activation again is not called a second time.
    """
    global _guard
    if _guard.pid != os.getpid():
        _guard = _Guard()
    with _guard.lock:
        outcomes = _guard.outcomes
        if record.entry not in outcomes and record.hooks is not None:
            outcomes[record.entry] = None
            try:
                record.hooks.hook.omni_activate()
            except (Exception, SystemExit) as error:
                outcomes[record.entry] = error
        return outcomes.get(record.entry)
