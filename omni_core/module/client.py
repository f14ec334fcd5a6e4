"""A module stage as the front end sees it: sessions over a socket, one process behind it."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from omni_core.errors import (
    ConfigError,
    EngineDied,
    GenerationCancelled,
    GenerationError,
    StageStartError,
    StageUnavailable,
)
from omni_core.folders import OwnedFolder
from omni_core.module.contract import Values
from omni_core.module.messages import (
    ENCODER,
    REPLIES,
    Changed,
    Close,
    Open,
    Output,
    Push,
    Ready,
    Request,
    Sleep,
    WakeUp,
)
from omni_core.module.process import ModuleSettings, run
from omni_core.supervisor import SleepMode

START_TIMEOUT_SECONDS = 600
MODULE_PROCESS = "omni-"
"""What the names of processes of module stages begin with."""
PREFIX = "omni-module-"
"""Of the folder of an engine's socket, among the temporary files."""


class ModuleSession:
    """One request in a module stage. Close it, whatever happens; closing twice is fine."""

    def __init__(self, engine: ModuleEngine) -> None:
        self.id = uuid.uuid4().hex
        self._engine: ModuleEngine | None = engine
        self._number = 0
        self._aborted: str | None = None

    async def push(self, values: Values) -> Values:
        """Hand in one input and wait for its output.

        Raises:
            GenerationError: the module failed; names the stage.
            GenerationCancelled: the stage was put to sleep.
            EngineDied: the process died.
        """
        if self._aborted is not None:
            raise GenerationCancelled(self._aborted)
        if self._engine is None:
            raise RuntimeError("the session is closed")
        self._number += 1
        return await self._engine._push(self.id, self._number, values)

    def close(self) -> None:
        """Drop the session and whatever waits in it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine._close_session(self.id)

    def abort(self, reason: str) -> None:
        """Drop the session; whoever waits for it, or pushes into it, gets ``GenerationCancelled`` with ``reason``."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._aborted = reason
            engine._close_session(self.id, GenerationCancelled(reason))


class ModuleEngine:
    """The process of a module stage. Construction blocks until the module is loaded.

    Raises:
        StageStartError: it could not be loaded; gives the reason.
    """

    def __init__(self, settings: ModuleSettings) -> None:
        self.stage = settings.stage
        self._folder = OwnedFolder(Path(tempfile.gettempdir()), PREFIX)
        address = f"ipc://{self._folder.path / 'socket'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._async_socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[tuple[str, int], asyncio.Future[Values]] = {}
        self._sessions: dict[str, ModuleSession] = {}
        self._changes: deque[asyncio.Future[str | None]] = deque()
        self._emptied: asyncio.Future[None] | None = None
        self._cannot_sleep = ""
        self._unwatch: Callable[[], object] = lambda: None
        self._closed = self._dead = False
        self.process = multiprocessing.get_context("spawn").Process(
            target=run, args=(settings, address), name=f"{MODULE_PROCESS}{settings.stage}", daemon=True
        )
        try:
            self.process.start()
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _await_ready(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.process.sentinel, zmq.POLLIN)
        events = dict(poller.poll(START_TIMEOUT_SECONDS * 1000))
        if self._socket not in events:
            why = f"its process ended with status {self.process.exitcode}" if events else "it took too long"
            raise StageStartError(f"stage {self.stage!r} cannot start: {why}")
        reply = REPLIES.decode(self._socket.recv())
        assert isinstance(reply, Ready)
        if reply.error is not None:
            raise StageStartError(f"stage {self.stage!r} cannot start: {reply.error}")
        self._cannot_sleep = reply.cannot_sleep

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call ``on_death`` on the running loop, once, when the process has ended."""
        loop = asyncio.get_running_loop()
        sentinel = self.process.sentinel

        def ended() -> None:
            loop.remove_reader(sentinel)
            self._die()
            on_death()

        loop.add_reader(sentinel, ended)
        self._unwatch = lambda: None if loop.is_closed() else loop.call_soon_threadsafe(loop.remove_reader, sentinel)

    def open(self, options: Values | None = None) -> ModuleSession:
        """Begin a session; call it on the event loop."""
        self.check_available()
        session = ModuleSession(self)
        self._send(Open(session.id, dict(options or {})))
        self._sessions[session.id] = session
        return session

    def check_available(self) -> None:
        """Raise ``EngineDied`` if the process is dead."""
        if self._dead or self._closed or not self.process.is_alive():
            raise EngineDied(f"stage {self.stage!r} is dead")

    async def _push(self, session: str, number: int, values: Values) -> Values:
        self.check_available()
        future: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self._answers[session, number] = future
        try:
            self._send(Push(session, number, dict(values)))
            return await future
        finally:
            self._answers.pop((session, number), None)

    def _close_session(self, session: str, error: Exception | None = None) -> None:
        for key in [key for key in self._answers if key[0] == session]:
            if error is None:
                self._answers[key].cancel()
            elif not self._answers[key].done():
                self._answers[key].set_exception(error)
        self._sessions.pop(session, None)
        if not self._sessions and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        if not (self._dead or self._closed):
            self._send(Close(session))

    def _send(self, message: Request) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._async_socket = zmq.asyncio.Socket.from_socket(self._socket)
            self._reader = loop.create_task(self._read(self._async_socket), name=f"replies of {self.stage}")
        assert self._async_socket is not None
        self._async_socket.send(ENCODER.encode(message))  # done at once: there is no high-water mark

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            reply = REPLIES.decode(await socket.recv())
            if isinstance(reply, Changed):
                change = self._changes.popleft()
                if not change.done():
                    change.set_result(reply.error)
                continue
            assert isinstance(reply, Output)
            future = self._answers.get((reply.session, reply.number))
            if future is None or future.done():
                continue  # nobody waits for it any more
            if reply.error is not None:
                future.set_exception(GenerationError(f"stage {self.stage!r} failed: {reply.error}"))
            else:
                future.set_result(reply.values or {})

    def check_sleep(self, level: int) -> None:
        """Raise ``ConfigError`` if the stage cannot sleep so."""
        if level != 1:
            raise ConfigError(f"stage {self.stage!r} cannot sleep at level {level}: module stages have level 1 alone")
        if self._cannot_sleep:
            raise ConfigError(f"stage {self.stage!r} cannot sleep: {self._cannot_sleep}")

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Have the module give up the device's memory.

        ``mode``: ``abort`` the open sessions, or ``wait`` for their end.

        Raises:
            ConfigError: the module cannot sleep, or not at this level.
            GenerationError: it failed to, and is awake.
            EngineDied: the process died.
        """
        self.check_sleep(level)
        if mode == "abort":
            for session in list(self._sessions.values()):
                session.abort(f"stage {self.stage!r} aborted the request: it was put to sleep")
        while self._sessions:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied
        try:
            error = await self._change(Sleep())
        except asyncio.CancelledError:  # nobody would wake it
            self._changes.append(asyncio.get_running_loop().create_future())
            self._send(WakeUp())
            raise
        if error is not None:
            raise GenerationError(f"stage {self.stage!r} cannot sleep: {error}")

    async def wake_up(self) -> None:
        """Undo ``sleep``; fine where it is awake.

        Raises:
            StageUnavailable: the module failed to wake up; it may be tried again.
            EngineDied: the process died.
        """
        if (error := await self._change(WakeUp())) is not None:
            raise StageUnavailable(f"stage {self.stage!r} cannot wake up: {error}")

    async def _change(self, message: Sleep | WakeUp) -> str | None:
        """What the process answers."""
        self.check_available()
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._changes.append(future)
        self._send(message)
        return await future

    def _die(self) -> None:
        self._dead = True
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *self._changes]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDied(f"stage {self.stage!r} died"))

    def close(self) -> None:
        """Stop the process. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        if self.process.pid is not None:
            self.process.terminate()
            self.process.join(5)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        if self._loop is not None and self._loop.is_running() and self._loop is not _running_loop():
            self._loop.call_soon_threadsafe(self._close_socket)
        else:
            self._close_socket()
        self._folder.close()

    def _close_socket(self) -> None:
        """Close the socket once its loop watches it no more; call it where the loop does not run meanwhile.

        The number of its file descriptor is soon another file's. A loop that still watches it would never hear of that
        file, such as the connection of a client.
        """
        if self._reader is not None and self._loop is not None and not self._loop.is_closed():
            self._reader.cancel()
            self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)
        self._context.term()  # or its threads and files stay, a few for each engine


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
