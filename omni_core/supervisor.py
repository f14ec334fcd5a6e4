"""A stage that is restarted when it dies, and can be put to sleep. Knows nothing of vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from omni_core.diffusion.messages import Job, Report
from omni_core.errors import EngineDied, GenerationError, StageUnavailable
from omni_core.runtime import StageClient

logger = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 1.0, 60.0
"""Seconds before the first restart, doubled for each that fails, and the most that it grows to."""

SleepMode = Literal["abort", "wait"]

T = TypeVar("T")


class StageState(StrEnum):
    """What a stage is doing."""

    RUNNING = "running"
    ASLEEP = "asleep"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Engine(StageClient, Protocol):
    """A running stage, see ``omni_core.vllm.engine.DiffusionEngine``."""

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call ``on_death`` on the running loop, once, when the engine's process has ended."""

    async def sleep(self, level: int, mode: SleepMode) -> None: ...

    async def wake_up(self) -> None: ...

    async def stats(self, reset: bool = False) -> Mapping[str, Any]: ...


class SupervisedStage:
    """A stage that outlives its engine.

    When the engine dies the requests in it fail, new ones are refused with ``StageUnavailable``, and the engine is
    started again: at once at first, then after pauses that double up to a minute.

    Args:
        start: starts an engine; blocks until its model is loaded.
    """

    def __init__(self, start: Callable[[], Engine]) -> None:
        self._start = start
        self._engine: Engine | None = start()
        self.stage = self._engine.stage
        self.max_running = self._engine.max_running
        self.state = StageState.RUNNING
        self.restarts = 0
        self.reason = ""
        self.totals: Mapping[str, Any] = {}
        self._watched: Engine | None = None
        self._ended: asyncio.Future[None]
        self._restarting: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    # Requests

    async def generate(self, job: Job, request_id: str) -> AsyncIterator[Report]:
        """Reports on a request, see ``DiffusionEngine.generate``; ends at once when the engine does.

        Raises:
            StageUnavailable: the stage cannot take the request, or was stopped while the request was in it.
            GenerationError: the stage died while the request was in it.
        """
        engine = self._available()
        ended = self._ended
        async with aclosing(engine.generate(job, request_id)) as reports:  # type: ignore[type-var]
            try:
                while (report := await self._next(reports, ended, request_id)) is not None:
                    self.totals = report.totals
                    yield report
            except EngineDied:
                self._on_death()  # known before its process has ended
                raise

    async def _next(
        self, reports: AsyncIterator[Report], ended: asyncio.Future[None], request_id: str
    ) -> Report | None:
        """The next report, ``None`` after the last; the engine's end is not waited out."""
        try:
            return await _unless(ended, anext(reports, None))
        except _Ended:
            pass
        if self.state is StageState.STOPPED:
            raise StageUnavailable(f"stage {self.stage!r} was stopped while request {request_id} was in it")
        raise GenerationError(f"stage {self.stage!r} died while request {request_id} was in it")

    def take(self, report: Report) -> npt.NDArray[np.generic]:
        """The frames that ``report`` points to; they can be taken once."""
        if self._engine is None:
            raise GenerationError(f"stage {self.stage!r} died before its result was taken")
        return self._engine.take(report)

    def discard(self, request_id: str) -> None:
        """Drop whatever result a request left that nobody will take."""
        if self._engine is not None:
            self._engine.discard(request_id)

    async def stats(self, reset: bool = False) -> Mapping[str, Any]:
        """Counters of the first worker."""
        return await self._available().stats(reset)

    def check_available(self) -> None:
        """Raise ``StageUnavailable`` if a request could not run now."""
        self._available()

    def _available(self) -> Engine:
        if self._engine is None or self.state is not StageState.RUNNING:
            hint = "; wake it up with POST /v1/omni/wakeup" if self.state is StageState.ASLEEP else ""
            why = f": {self.reason}" if self.reason else ""
            raise StageUnavailable(f"stage {self.stage!r} is {self.state}{why}{hint}")
        self.watch()
        return self._engine

    # Life

    def watch(self) -> None:
        """Watch the engine from the running loop on; again is fine."""
        if self._engine is not None and self._watched is not self._engine:
            self._watched = self._engine
            self._ended = asyncio.get_running_loop().create_future()
            self._engine.watch(self._on_death)

    def _on_death(self) -> None:
        if self.state is StageState.STOPPED or self._restarting is not None:
            return  # a second sign of the same death
        self.state, self.reason = StageState.RESTARTING, "its process ended"
        self._end_requests()
        logger.error("stage %s died; it is started again", self.stage)
        self._restarting = asyncio.get_running_loop().create_task(self._restart(), name=f"restart {self.stage}")

    def _end_requests(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _restart(self) -> None:
        old, self._engine = self._engine, None
        if old is not None:
            try:
                await asyncio.to_thread(old.close)
            except Exception:
                logger.exception("stage %s: what is left of the engine that died cannot be stopped", self.stage)
        delay = 0.0
        while self.state is StageState.RESTARTING:
            await asyncio.sleep(delay)
            self.restarts += 1
            try:
                self._engine = await asyncio.to_thread(self._start)
            except Exception as error:  # whatever it is: nobody else would start the stage again
                delay = min(max(FIRST_DELAY, 2 * delay), LAST_DELAY)
                self.reason = f"start {self.restarts} failed, the next is in {delay:g} s: {error}"
                logger.error("stage %s: %s", self.stage, self.reason)
                continue
            break
        self._restarting = None
        if self._engine is None:
            return
        if self.state is StageState.STOPPED:  # it was closed meanwhile
            await asyncio.to_thread(self._engine.close)
            return
        self.state, self.reason = StageState.RUNNING, ""
        self.watch()
        logger.info("stage %s runs again", self.stage)

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Free device memory: with level 1 the weights go to host memory. Raises ``StageUnavailable``."""
        self._available()  # one that is about to sleep, or to wake, refuses at once
        async with self._changing:
            engine = self._available()
            self.state = StageState.ASLEEP
            try:
                await self._change(engine.sleep(level, mode))
            except BaseException:
                if self.state is StageState.ASLEEP:
                    self.state = StageState.RUNNING
                raise

    async def wake_up(self) -> None:
        """Undo ``sleep``; nothing to do where the stage is awake. Raises ``StageUnavailable`` where it is dead.

        A stage that is about to sleep falls asleep first: its engine would not give up what it has begun.
        """
        async with self._changing:
            if self.state is StageState.ASLEEP and self._engine is not None:
                await self._change(self._engine.wake_up())
                if self.state is StageState.ASLEEP:
                    self.state = StageState.RUNNING
        self._available()

    async def _change(self, change: Awaitable[None]) -> None:
        try:
            await _unless(self._ended, change)
        except _Ended:
            raise StageUnavailable(f"stage {self.stage!r} ended while it was put to sleep or woken") from None

    def status(self) -> dict[str, Any]:
        """State, number of restarts, and why it does not run, as ``/health`` shows it."""
        return {"state": str(self.state), "restarts": self.restarts, "reason": self.reason or None}

    def close(self) -> None:
        """Stop the engine for good. Closing twice is fine."""
        self.state = StageState.STOPPED
        engine, self._engine = self._engine, None
        if self._watched is not None:
            loop = self._ended.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end_requests)
        if engine is not None:
            engine.close()


class _Ended(Exception):
    """The engine ended first."""


async def _unless(ended: asyncio.Future[None], work: Awaitable[T]) -> T:
    """What ``work`` gives, unless the engine ends first: an engine that has died leaves waiting who waits for it."""
    coming = asyncio.ensure_future(work)
    try:
        await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait((coming,))
    raise _Ended
