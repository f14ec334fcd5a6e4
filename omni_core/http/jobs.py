"""Video jobs: what a client asked for, how far it is, and the finished file, kept on disk within bounds.

A job is ``ID.json`` beside ``ID.mp4`` in the store's folder, both written atomically. After a restart finished jobs
are still there, and those that were under way are failed with the reason.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from omni_core.http.files import lock_folder

Status = Literal["queued", "in_progress", "completed", "failed"]

_ID = re.compile(r"video_[0-9a-f]{32}")
_UNFINISHED = re.compile(r"(video|sync)_[0-9a-f]{32}\.partial\.(json|mp4)")


@dataclass(frozen=True)
class VideoJob:
    """OpenAI's video object.

    Attributes:
        id: ``video_`` and 32 hexadecimal digits.
        model: the served name of the model.
        prompt: the prompt.
        size: ``WIDTHxHEIGHT`` in pixels.
        seconds: duration of the video, as OpenAI writes it: a string.
        seed: the seed of the noise, drawn by the server where the request had none.
        created_at, completed_at, expires_at: Unix time in seconds.
        status: ``queued`` until the engine has started it, then ``in_progress``, then ``completed`` or ``failed``.
        progress: 0 to 100.
        error: ``code`` and ``message`` of a failed job.
        seconds_by_phase: how long it spent in each phase, once it is completed.
        object: always ``video``.
        remixed_from_video_id: always null.
    """

    id: str
    model: str
    prompt: str
    size: str
    seconds: str
    seed: int
    created_at: int
    status: Status = "queued"
    progress: int = 0
    completed_at: int | None = None
    expires_at: int | None = None
    error: dict[str, str] | None = None
    seconds_by_phase: dict[str, float] | None = None
    object: Literal["video"] = "video"
    remixed_from_video_id: None = None

    def to_json(self) -> dict[str, Any]:
        """The object as clients see it."""
        return asdict(self)

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.status in ("completed", "failed")


_JOB = TypeAdapter(VideoJob)


def new_job_id() -> str:
    """An id that no other job has; ids sort by the time at which they were made."""
    return f"video_{time.time_ns():016x}{secrets.token_hex(8)}"


class JobStore:
    """The jobs of a server.

    Args:
        folder: where they are kept; made if it is not there.
        ttl: seconds that an ended job is kept.
        limit: how many ended jobs are kept; the oldest go first.
    """

    def __init__(self, folder: Path, *, ttl: float, limit: int) -> None:
        self.folder = folder
        self.ttl = ttl
        self.limit = limit
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._readers: Counter[str] = Counter()
        self._lock = lock_folder(self.folder, "the video store")
        self._jobs = self._load()
        self.expire()

    def close(self) -> None:
        """Let another server have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _load(self) -> dict[str, VideoJob]:
        """The jobs of an earlier server. Files that are not a job's are left alone."""
        jobs = {}
        for path in self.folder.iterdir():  # a server that was killed was writing them
            if _UNFINISHED.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob("video_*.json")):
            if not _ID.fullmatch(path.stem):
                continue
            try:
                job = _JOB.validate_json(path.read_bytes(), strict=True)
            except (OSError, ValueError):
                continue
            if job.id != path.stem:
                continue
            if not job.ended:
                now = int(time.time())
                error = {"code": "server_restarted", "message": "the server was restarted before this video was done"}
                expires = now + int(self.ttl)
                job = replace(job, status="failed", error=error, completed_at=now, expires_at=expires)
                self._write(job)
            elif job.status == "completed" and not self.file(job.id).exists():
                path.unlink(missing_ok=True)
                continue
            jobs[job.id] = job
        return jobs

    def _write(self, job: VideoJob) -> None:
        partial = self.folder / f"{job.id}.partial.json"
        partial.write_text(json.dumps(job.to_json()))
        os.replace(partial, self.folder / f"{job.id}.json")

    def file(self, job_id: str) -> Path:
        """Where the finished video of a job is."""
        return self.folder / f"{job_id}.mp4"

    def partial_file(self, job_id: str) -> Path:
        """Where to write a video before ``complete`` moves it into place."""
        return self.folder / f"{job_id}.partial.mp4"

    def passing_file(self) -> Path:
        """Where to write a video that is no job's. The caller removes it; what is left, the next server does."""
        return self.folder / f"sync_{secrets.token_hex(16)}.partial.mp4"

    def put(self, job: VideoJob) -> None:
        """Add or replace a job. Progress of a running job is kept in memory only."""
        known = self._jobs.get(job.id)
        if known is None:
            self._write(job)  # one that cannot be kept is not taken
        elif job.ended:
            del self._jobs[job.id]  # so that ended ones are in the order of their end
        self._jobs[job.id] = job
        if known is not None and known.status != job.status:
            self._write(job)
        if known is None or job.ended:
            self.expire()

    def complete(self, job_id: str, seconds_by_phase: dict[str, float]) -> None:
        """Move the video that was written to ``partial_file`` into place and mark the job as completed."""
        os.replace(self.partial_file(job_id), self.file(job_id))
        self._end(job_id, status="completed", progress=100, seconds_by_phase=seconds_by_phase)

    def _end(self, job_id: str, **changes: Any) -> None:
        now = int(time.time())
        self.put(replace(self._jobs[job_id], completed_at=now, expires_at=now + int(self.ttl), **changes))

    def fail(self, job_id: str, code: str, message: str) -> None:
        """Mark a job as failed."""
        self.partial_file(job_id).unlink(missing_ok=True)
        self._end(job_id, status="failed", error={"code": code, "message": message})

    def get(self, job_id: str) -> VideoJob | None:
        """The job, or ``None`` if there is none of that id, or it has expired."""
        if not _ID.fullmatch(job_id):
            return None
        self.expire()
        return self._jobs.get(job_id)

    def list(self) -> list[VideoJob]:
        """All jobs, oldest first."""
        self.expire()
        return sorted(self._jobs.values(), key=lambda job: job.id)

    def delete(self, job_id: str) -> None:
        """Forget a job and remove its files."""
        self._jobs.pop(job_id, None)
        for path in (self.partial_file(job_id), self.folder / f"{job_id}.json"):
            path.unlink(missing_ok=True)
        if not self._readers[job_id]:
            self.file(job_id).unlink(missing_ok=True)

    def begin_reading(self, job_id: str) -> Path:
        """The video of a job, which stays until ``end_reading`` even if the job is deleted meanwhile."""
        self._readers[job_id] += 1
        return self.file(job_id)

    def end_reading(self, job_id: str) -> None:
        """Undo ``begin_reading``."""
        self._readers[job_id] -= 1
        if not self._readers[job_id]:
            del self._readers[job_id]
            if job_id not in self._jobs:
                self.file(job_id).unlink(missing_ok=True)

    def expire(self) -> None:
        """Remove ended jobs that are too old or too many."""
        ended = [job for job in self._jobs.values() if job.ended]
        oldest = time.time() - self.ttl
        surplus = len(ended) - self.limit
        for index, job in enumerate(ended):
            if index < surplus or (job.completed_at or job.created_at) < oldest:
                self.delete(job.id)
