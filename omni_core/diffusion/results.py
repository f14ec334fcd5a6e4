"""Results in shared memory: files with an owner that outlive no owner.

A video through the engine's message queues would stall every other request, so a worker writes its frames to a file
in shared memory and only the path travels. The front end owns the folder of its engine: it takes each result exactly
once, discards what nobody will take, and removes the folder when it stops (``omni_core/folders.py``).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_core.folders import LOCK, OwnedFolder

PREFIX = "omni-results-"
FAILURE = "failure"
FOLDER_VARIABLE = "OMNI_RESULTS_DIR"


def base_folder() -> Path:
    """Where results go: ``$OMNI_RESULTS_DIR``, else ``/dev/shm``, else the system's folder for temporary files."""
    if configured := os.environ.get(FOLDER_VARIABLE):
        return Path(configured)
    shared_memory = Path("/dev/shm")
    return shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())


def result_path(folder: str | Path, request_id: str) -> Path:
    """The file of a request's frames."""
    return Path(folder) / f"{request_id}.npy"


class ResultWriter:
    """Writes a request's frames as they come, into a file that a reader sees only once it is whole.

    Args:
        folder: where results go.
        request_id: whose frames these are.
        num_frames: how many there will be.
        dtype: their element type.
    """

    def __init__(self, folder: str | Path, request_id: str, num_frames: int, dtype: npt.DTypeLike) -> None:
        self.target = result_path(folder, request_id)
        self.num_frames = num_frames
        self.dtype = dtype
        self.written = 0
        self._partial = self.target.with_suffix(".partial")
        self._frames: np.memmap[Any, Any] | None = None

    def append(self, frames: npt.NDArray[Any]) -> None:
        """Add ``frames`` [frames, height, width, 3].

        Raises:
            ValueError: there are more frames than announced.
            OSError: no space is left; the message says what to do.
        """
        if self.written + len(frames) > self.num_frames:
            raise ValueError(f"{self.written + len(frames)} frames were decoded, {self.num_frames} were asked for")
        if self._frames is None:
            self._frames = self._allocate((self.num_frames, *frames.shape[1:]))
        self._frames[self.written : self.written + len(frames)] = frames
        self.written += len(frames)

    def _allocate(self, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
        frames: np.memmap[Any, Any] = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            self._partial, "w+", self.dtype, shape
        )
        try:
            # Writing to mapped pages that do not fit would kill the process; reserving them raises instead.
            with self._partial.open("r+b") as stream:
                os.posix_fallocate(stream.fileno(), 0, frames.offset + frames.nbytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot write {frames.nbytes} bytes of frames to {self.target.parent}: {error.strerror}; "
                f"give shared memory more room (docker run --shm-size) or set {FOLDER_VARIABLE} to another folder",
            ) from error
        return frames

    def finish(self) -> Path:
        """Make the file visible. Raises ``ValueError`` if frames are missing."""
        if self._frames is None or self.written < self.num_frames:
            raise ValueError(f"{self.written} frames were decoded, {self.num_frames} were asked for")
        self._frames.flush()
        self._frames = None
        self._partial.replace(self.target)
        return self.target

    def abandon(self) -> None:
        """Remove what was written. Harmless after ``finish``."""
        self._frames = None
        self._partial.unlink(missing_ok=True)


def discard_result(folder: str | Path, request_id: str) -> None:
    """Remove the frames of a request that nobody will take, if there are any."""
    result_path(folder, request_id).unlink(missing_ok=True)


def report_failure(folder: str | Path, reason: str) -> None:
    """Leave word of why a worker could not start: vLLM carries no exception from a worker to the front end."""
    (Path(folder) / FAILURE).write_text(reason)


class ResultFolder:
    """The folder of one engine's results, owned by the process that made it."""

    def __init__(self, base: Path | None = None) -> None:
        self._folder = OwnedFolder(base or base_folder(), PREFIX)
        self.path = self._folder.path

    def take(self, path: str | Path) -> npt.NDArray[np.generic]:
        """The frames at ``path``, mapped into memory; the file's name is gone when this returns.

        Raises:
            FileNotFoundError: there is no such result, or it has been taken.
            ValueError: ``path`` is not in this folder.
        """
        path = Path(path)
        if path.parent != self.path:
            raise ValueError(f"{path} is not a result of {self.path}")
        frames: npt.NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False)
        path.unlink()
        return frames

    def discard(self, external_id: str) -> None:
        """Remove whatever was written for a request, known by the id that the front end gave it.

        The engine appends ``-`` and eight characters to that id.
        """
        for path in self.path.glob(f"{external_id}-????????.npy"):
            path.unlink(missing_ok=True)

    def pending(self) -> list[str]:
        """Names of results that were written and not taken."""
        return sorted(path.name for path in self.path.iterdir() if path.name != LOCK)

    def failure(self) -> str | None:
        """What ``report_failure`` left."""
        path = self.path / FAILURE
        return path.read_text() if path.exists() else None

    def close(self) -> None:
        """Remove the folder and everything in it. Closing twice is fine."""
        self._folder.close()
