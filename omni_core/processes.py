"""What every child process of Omni does alike."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from typing import Any


def die_with_parent() -> None:
    """Let the kernel end this process as soon as the one that started it ends, however it ends (Linux only).

    The engine's processes then end in turn: each watches or is bound to the one above it.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _end_with(parent.pid)


def _end_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1  # <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def describe(error: BaseException) -> str:
    """An exception as text that can travel: bounded, Unicode, and there even if the exception cannot say itself."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:2000].encode("utf-8", "replace").decode()


class ParentBound(dict[str, Any]):
    """A dictionary that binds the process it is spawned into to its parent, as ``die_with_parent`` does.

    It acts while the arguments of the new process are unpickled: an engine of vLLM's waits for its parent, for minutes,
    before anything of Omni's is called in it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _bind, (os.getpid(), dict(self))


def _bind(parent: int, values: dict[str, Any]) -> ParentBound:
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # set while a spawned process unpickles
        _end_with(parent)
    return ParentBound(values)
