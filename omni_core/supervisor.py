"""A stage that is restarted when it dies, and can be put to sleep. Knows nothing of vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from enum import StrEnum
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from omni_core.errors import EngineDied, GenerationError, StageUnavailable

logger = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 1.0, 60.0
"""Seconds before the first restart, doubled for each that fails, and the most that it grows to."""

SleepMode = Literal["abort", "wait"]

T = TypeVar("T")
EngineT = TypeVar("EngineT", bound="Engine")


class StageState(StrEnum):
    """What a stage is doing."""

    RUNNING = "running"
    ASLEEP = "asleep"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Engine(Protocol):
    """A running stage of any kind, as it is kept alive."""

    stage: str

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call ``on_death`` on the running loop, once, when the engine's process has ended."""

    def check_sleep(self, level: int) -> None:
        """Raise ``ConfigError`` if the engine cannot sleep so."""

    async def sleep(self, level: int, mode: SleepMode) -> None: ...

    async def wake_up(self) -> None: ...

    def close(self) -> None: ...


class SupervisedStage(Generic[EngineT]):
    """A stage that outlives its engine.

    When the engine dies the requests in it fail, new ones are refused with ``StageUnavailable``, and the engine is
    started again: at once at first, then after pauses that double up to a minute.

    Args:
        start: starts an engine; blocks until its model is loaded.
    """

    def __init__(self, start: Callable[[], EngineT]) -> None:
        self._start = start
        self._engine: EngineT | None = start()
        self.stage = self._engine.stage
        self.state = StageState.RUNNING
        self.restarts = 0
        self.reason = ""
        self._watched: EngineT | None = None
        self._ended: asyncio.Future[None]
        self._restarting: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    # Requests

    async def follow(self, make: Callable[[EngineT], AsyncIterator[T]], request_id: str) -> AsyncIterator[T]:
        """What ``make`` gives of the engine, one after the other; ends at once when the engine does.

        Raises:
            StageUnavailable: the stage cannot take the request, or was stopped while the request was in it.
            GenerationError: the stage died while the request was in it.
        """
        engine = self._available()
        ended = self._ended
        async with aclosing(make(engine)) as items:  # type: ignore[type-var]
            with _Until(ended) as until:
                try:
                    while (item := await self._wait(until, anext(items, None), request_id)) is not None:
                        yield item
                except EngineDied:
                    self._died(ended)  # known before its process has ended
                    raise

    def hold(self) -> tuple[EngineT, asyncio.Future[None]]:
        """The engine, for work that comes bit by bit, and what is done when it ends. Raises ``StageUnavailable``."""
        return self._available(), self._ended

    async def call(self, work: Awaitable[T], ended: asyncio.Future[None], request_id: str) -> T:
        """What ``work`` gives, which is of the engine that ``hold`` gave with ``ended``.

        Raises:
            StageUnavailable: the stage was stopped.
            GenerationError: that engine died, even if another one runs by now.
        """
        with _Until(ended) as until:
            try:
                return await self._wait(until, work, request_id)
            except EngineDied as error:  # which does not know whose work it was
                self._died(ended)
                raise EngineDied(f"stage {self.stage!r} died while request {request_id} was in it") from error

    def _died(self, ended: asyncio.Future[None]) -> None:
        """Work says that the engine of ``ended`` died, which may be known already, and another one running."""
        if not ended.done():
            self._on_death()

    async def _wait(self, until: _Until, work: Awaitable[T], request_id: str) -> T:
        """What ``work`` gives; the engine's end is not waited out."""
        try:
            return await until.wait(work)
        except _Ended:
            pass
        if self.state is StageState.STOPPED:
            raise StageUnavailable(f"stage {self.stage!r} was stopped while request {request_id} was in it")
        raise GenerationError(f"stage {self.stage!r} died while request {request_id} was in it")

    def check_available(self) -> None:
        """Raise ``StageUnavailable`` if a request could not run now."""
        self._available()

    def _available(self) -> EngineT:
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
                self._engine, error = await asyncio.to_thread(self._try_to_start)
            except RuntimeError:  # of the loop: it is being closed, as when a script is interrupted
                self.state, self.reason = StageState.STOPPED, "there is no event loop any more to start it again on"
                break
            if error is not None:
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

    def _try_to_start(self) -> tuple[EngineT | None, Exception | None]:
        """An engine, or why there is none, whatever it is: nobody else would start the stage again."""
        try:
            return self._start(), None
        except Exception as error:
            return None, error

    def check_sleep(self, level: int) -> None:
        """Raise ``ConfigError`` if the stage cannot sleep so, ``StageUnavailable`` if it does not run."""
        self._available().check_sleep(level)

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
            with _Until(self._ended) as until:
                await until.wait(change)
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


class _Until:
    """Awaits work that ends when the engine does: an engine that has died leaves waiting who waits for it.

    The task that waits is cancelled then, as ``asyncio.timeout`` does it. A task of its own for each piece of work
    would cost more than the work: a stream waits for every few frames.

    Args:
        ended: done when the engine has ended.
    """

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended, self._cancelled = ended, False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        self._ended.add_done_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.remove_done_callback(self._end)

    def _end(self, _: object) -> None:
        if self._task is not None:
            self._cancelled = True
            self._task.cancel()

    async def wait(self, work: Awaitable[T]) -> T:
        """What ``work`` gives. Raises ``_Ended`` if the engine has ended, or ends first."""
        if self._ended.done():
            if isinstance(work, Coroutine):
                work.close()
            raise _Ended
        task = self._task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            result = await work
        except BaseException:
            if self._cancelled and task.uncancel() <= before:  # nobody else cancelled it
                raise _Ended from None
            raise
        finally:
            self._task = None
        if self._cancelled:
            task.uncancel()
        return result
