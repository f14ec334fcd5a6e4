"""Folders of a process that are gone when it is: removed when it stops, swept by the next one where it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = "owner.lock"


class OwnedFolder:
    """A new folder under ``base``, owned by the process that makes it. Those of owners that have died are removed.

    The owner holds a lock that the kernel releases with the process.
    """

    def __init__(self, base: Path, prefix: str) -> None:
        base.mkdir(parents=True, exist_ok=True)
        sweep(base, prefix)
        new = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=base))
        self._lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Sweepers look for the final name, which it gets only now that it is locked.
        self.path = new.rename(base / new.name.removeprefix("new-"))

    def close(self) -> None:
        """Remove the folder and everything in it. Closing twice is fine."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(base: Path, prefix: str) -> list[Path]:
    """Remove the folders under ``base`` whose owner has died; gives what was removed.

    An owner holds a lock on the file ``owner.lock`` in its folder.
    """
    removed = []
    for folder in base.glob(f"{prefix}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made just now, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed
