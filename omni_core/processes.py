"""What every child process of Omni does alike."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys


def die_with_parent() -> None:
    """Let the kernel end this process as soon as the one that started it ends, however it ends (Linux only).

    The engine's processes then end in turn: each watches or is bound to the one above it.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    pr_set_pdeathsig = 1  # <linux/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def describe(error: BaseException) -> str:
    """An exception as text that can travel: bounded, Unicode, and there even if the exception cannot say itself."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:2000].encode("utf-8", "replace").decode()
