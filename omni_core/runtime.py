"""The front end of a served video model: validation, admission, progress, results. Knows nothing of vLLM.

HTTP and the Python API both go through ``VideoEngine``, so that a request means the same in both.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np
import numpy.typing as npt

from omni_core.diffusion.messages import FrameType, Job, Phase, Report
from omni_core.errors import GenerationError, QueueFull, RequestError
from omni_core.requests import MAX_SEED, VideoRequest, parse_request


class StageClient(Protocol):
    """What the front end needs of a stage."""

    stage: str

    @property
    def max_running(self) -> int: ...

    def generate(self, job: Job, request_id: str) -> AsyncIterator[Report]: ...

    def take(self, report: Report) -> npt.NDArray[np.generic]: ...

    def discard(self, request_id: str) -> None: ...

    def check_available(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How far a request is.

    Attributes:
        phase: ``waiting`` (not started), ``encode``, ``denoise`` or ``decode``.
        step: denoising steps taken.
        num_steps: denoising steps in all; 0 until it has started.
    """

    phase: Phase
    step: int
    num_steps: int

    @property
    def percent(self) -> int:
        """0 to 99: denoising steps taken out of all, where 100 is left for a finished file."""
        return min(99, 100 * self.step // self.num_steps) if self.num_steps else 0


@dataclass(frozen=True)
class VideoOutput:
    """A generated video.

    Attributes:
        frames: [frames, height, width, 3], uint8 (0..255) or float32 (0..1), RGB.
        request: the request as it was run, with its seed.
        request_id: the id under which it ran.
        seconds: time in the stage by phase.
    """

    frames: npt.NDArray[Any]
    request: VideoRequest
    request_id: str
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def fps(self) -> int:
        """Frames per second at which the video is meant to be played."""
        return self.request.fps


@dataclass(frozen=True)
class RequestRecord:
    """What became of a request: ``outcome`` is ``done``, ``error`` or ``cancelled``.

    ``seconds``: time waiting (``queue``) and in each phase of the work.
    """

    outcome: str
    seconds: Mapping[str, float]


ProgressCallback = Callable[[Progress], None]


def new_request_id() -> str:
    """An id that no other request has."""
    return f"video-{uuid.uuid4().hex}"


class Counted(Protocol):
    """A front end that counts the requests in it."""

    active: int


class Slot:
    """A place in the queue of an engine, held from admission until ``release``. Releasing twice is fine."""

    def __init__(self, engine: Counted) -> None:
        self._engine: Counted | None = engine
        engine.active += 1

    def release(self) -> None:
        """Give the place back."""
        if self._engine is not None:
            self._engine.active -= 1
            self._engine = None


class _Follower:
    """Follows one request: counts it as running once it is, measures its wait, hands progress on."""

    def __init__(self, engine: VideoEngine, progress: ProgressCallback | None) -> None:
        self._engine, self._progress = engine, progress
        self._begin = time.perf_counter()
        self._running = False
        self.seconds: dict[str, float] = {}

    def see(self, report: Report) -> None:
        """Take note of a report."""
        if report.phase != "waiting" and not self._running:
            self._running = True
            self._engine.running += 1
            self.seconds["queue"] = max(0.0, time.perf_counter() - self._begin - sum(report.seconds.values()))
        self.seconds.update(report.seconds)
        if self._progress is not None and not report.done:
            self._progress(Progress(report.phase, report.step, report.num_steps))

    def end(self) -> None:
        """The request has ended, one way or another."""
        if self._running:
            self._running = False
            self._engine.running -= 1


class VideoEngine:
    """A served video model.

    Args:
        client: the stage that does the work.
        request_model: the family's request model for the checkpoint.
        max_queued: how many requests may wait beyond those that the stage runs at once.
    """

    def __init__(self, client: StageClient, request_model: type[VideoRequest], max_queued: int) -> None:
        self.client = client
        self.request_model = request_model
        self.max_queued = max_queued
        self.active = 0
        self.running = 0
        self.ended: Counter[str] = Counter(done=0, error=0, cancelled=0)
        self.on_end: Callable[[RequestRecord], None] = lambda record: None

    def parse(self, values: Mapping[str, Any], *, strict: bool = True) -> VideoRequest:
        """Validate ``values`` and draw a seed where there is none. Raises ``RequestError``."""
        request = parse_request(self.request_model, values, strict=strict)
        if request.seed is None:
            request = request.model_copy(update={"seed": secrets.randbelow(MAX_SEED)})
        return request

    @property
    def capacity(self) -> int:
        """How many requests may be running and waiting."""
        return self.client.max_running + self.max_queued

    def admit(self) -> Slot:
        """Take a place for one request. Raises ``QueueFull`` or ``StageUnavailable``."""
        self.client.check_available()
        if self.active >= self.capacity:
            raise QueueFull(f"{self.active} requests are running or waiting, the most that this server takes")
        return Slot(self)

    async def generate(
        self,
        request: VideoRequest,
        *,
        frame_type: FrameType = "uint8",
        progress: ProgressCallback | None = None,
        request_id: str | None = None,
        slot: Slot | None = None,
    ) -> VideoOutput:
        """Run a request to its end. Cancelling the task aborts the work in the engine.

        ``slot`` is the request's place where the caller has taken one; the caller then releases it, when it is done
        with the frames.

        Raises:
            QueueFull: the bound on waiting requests is reached.
            GenerationError: the request failed; names stage and request.
            GenerationCancelled: the engine dropped the request.
        """
        if frame_type not in get_args(FrameType):
            raise RequestError(
                f"frame_type={frame_type!r} must be one of {', '.join(get_args(FrameType))}", "frame_type"
            )
        own = self.admit() if slot is None else None
        request_id = request_id or new_request_id()
        follower = _Follower(self, progress)
        taken, outcome = False, "error"
        try:
            job = Job(request.model_dump(), frame_type)
            report = await self._last_report(job, request_id, follower)
            if report.error is not None:
                raise GenerationError(f"request {request_id} failed in stage {self.client.stage!r}: {report.error}")
            frames = self.client.take(report)
            taken, outcome = True, "done"
            return VideoOutput(frames, request, request_id, report.seconds)
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            if own is not None:
                own.release()
            follower.end()
            self.ended[outcome] += 1
            self.on_end(RequestRecord(outcome, follower.seconds))
            if not taken:
                self.client.discard(request_id)

    async def _last_report(self, job: Job, request_id: str, follower: _Follower) -> Report:
        async with aclosing(self.client.generate(job, request_id)) as reports:  # type: ignore[type-var]
            async for report in reports:
                follower.see(report)
                if report.done:
                    return report
        raise GenerationError(f"request {request_id} ended in stage {self.client.stage!r} without a result")

    def close(self) -> None:
        """Stop the stage."""
        self.client.close()
