"""Errors that users see: one line each, naming the thing, the value, what was expected and the way out."""

from __future__ import annotations


class OmniError(Exception):
    """Base of what Omni raises on purpose; the command line prints the message and exits with ``exit_code``."""

    exit_code = 2


class PluginError(OmniError):
    """A plugin is broken, does not fit, or claims what another claims."""


class MissingPlugin(OmniError):
    """Nothing installed can do what was asked; the message says what to install."""


class VersionMismatch(PluginError):
    """A version range does not admit what is installed."""


class PluginSetMismatch(PluginError):
    """A child process would see other plugins than its parent handed it."""


class CheckpointError(OmniError):
    """A checkpoint cannot be found or read."""


class UnsupportedCheckpoint(CheckpointError):
    """A family recognises the checkpoint but cannot serve it; the message gives the reason."""


class ConfigError(OmniError):
    """A flag, a deploy file or an override is wrong."""


class StageStartError(OmniError):
    """A stage could not start; the message names it and gives the reason."""


class RequestError(OmniError):
    """A request is invalid.

    Attributes:
        param: the field at fault, or ``None`` where it is the request as a whole.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(OmniError):
    """The bound on waiting requests is reached; try again after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StageUnavailable(OmniError):
    """A stage is down, asleep or being restarted; try again after ``retry_after`` seconds."""

    exit_code = 1
    retry_after = 5


class GenerationError(OmniError):
    """A request failed in a stage; the message names stage and request."""

    exit_code = 1


class EngineDied(GenerationError):
    """The engine of a stage died with a request in it."""


class GenerationCancelled(OmniError):
    """A request was cancelled before it was done."""

    exit_code = 1
