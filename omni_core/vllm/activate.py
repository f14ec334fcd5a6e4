"""Activation inside vLLM's processes: nothing in a plain vLLM process, the parent's plugin set in an Omni one."""

from __future__ import annotations

import logging
import os

from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, get_manager
from omni_core.processes import die_with_parent


def activate() -> None:
    """Make this process an Omni process: register the core's and every plugin's extensions. Again is fine.

    Raises:
        PluginSetMismatch: this process would see other plugins than its parent.
        PluginError: a plugin's activation failed.
    """
    from omni_core.vllm.diffusion import config

    _share_logging()
    config.register()
    get_manager().activate()


def _share_logging() -> None:
    """Let the core's loggers write where vLLM's do, in its format and at its level."""
    ours, theirs = logging.getLogger("omni_core"), logging.getLogger("vllm")
    ours.handlers = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def activate_in_vllm() -> None:
    """Entry point of the group ``vllm.general_plugins``: vLLM calls it in each of its processes.

    Only a process that an Omni parent started has the plugin set in its environment; in any other this returns at
    once, so that installing Omni changes nothing for plain vLLM.
    """
    if PLUGIN_SET_VARIABLE in os.environ:
        die_with_parent()
        activate()
