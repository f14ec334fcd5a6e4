"""The process of a module stage: take what waits, batch it by key, run it, answer."""

from __future__ import annotations

import gc
import importlib
import logging
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zmq

from omni_core.errors import OmniError
from omni_core.module.contract import ModuleContext, StageModule, Values
from omni_core.module.messages import (
    ENCODER,
    REQUESTS,
    Changed,
    Close,
    Open,
    Output,
    Push,
    Ready,
    Reply,
    Request,
    Sleep,
)
from omni_core.plugins.declarations import load_reference
from omni_core.processes import describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModuleSettings:
    """What the process needs to know; pickled to it.

    Attributes:
        stage: the stage's name, for messages.
        module: ``"module:Class"`` of the ``StageModule``.
        checkpoint: local folder.
        device: where it runs, as torch writes it.
        dtype: element type of the computation, by torch's name.
        options: the family's own options of the stage.
        max_batch: the most sessions of a step.
        num_threads: threads of an operation on the CPU.
    """

    stage: str
    module: str
    checkpoint: str
    device: str
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    max_batch: int = 64
    num_threads: int = 1


@dataclass
class Session:
    """One request within the process: its state, and the inputs that wait."""

    state: Any = None
    waiting: deque[tuple[int, Values]] = field(default_factory=deque)
    error: str | None = None


class ModuleRunner:
    """Sessions and steps; knows nothing of sockets.

    Args:
        module: what computes.
        context: what it was loaded with, and is woken with.
        answer: called with each output, and when the module sleeps or is awake again.
        max_batch: the most sessions of a step.
    """

    def __init__(
        self,
        module: StageModule[Any],
        context: ModuleContext,
        answer: Callable[[Output | Changed], None],
        max_batch: int,
    ) -> None:
        self.module, self.context, self.answer, self.max_batch = module, context, answer, max_batch
        self.sessions: dict[str, Session] = {}
        self.asleep = False

    def receive(self, message: Request) -> None:
        """Take note of a message; computes nothing but a session's first state. Sleep and wake-up are done at once."""
        if isinstance(message, Close):
            if (closed := self.sessions.pop(message.session, None)) is not None:
                self._release(closed)
        elif isinstance(message, Open):
            session = self.sessions[message.session] = Session()
            try:
                if self.asleep:
                    raise RuntimeError("the module is asleep")
                session.state = self.module.open(message.options)
            except Exception as error:
                self._fail(session, error)
        elif isinstance(message, Push):
            if (pushed := self.sessions.get(message.session)) is not None:
                pushed.waiting.append((message.number, message.values))
        else:
            with torch.inference_mode(False):
                why_not = self._sleep() if isinstance(message, Sleep) else self._wake_up()
            self.answer(Changed(why_not))

    def _sleep(self) -> str | None:
        """Why the module is not asleep, where it is not.

        One that fails to fall asleep is woken, and where that fails as well, the process ends with the error.
        """
        if self.asleep:
            return None
        if self.sessions:
            return f"{len(self.sessions)} sessions are open"
        if self.module.cannot_sleep:
            return self.module.cannot_sleep
        try:
            self.module.sleep()
        except Exception as error:
            logger.error("the module cannot fall asleep", exc_info=error)
            self.module = self.module.wake_up(self.context)
            return describe(error)
        self.asleep = True
        gc.collect()  # what is freed must not wait for the next session
        if self.context.device.type != "cpu":
            torch.get_device_module(self.context.device).empty_cache()
        return None

    def _wake_up(self) -> str | None:
        """Why the module is still asleep, where it is."""
        if not self.asleep:
            return None
        try:
            self.module = self.module.wake_up(self.context).eval()
        except Exception as error:
            logger.error("the module cannot wake up", exc_info=error)
            return str(error) if isinstance(error, OmniError) else describe(error)
        self.asleep = False
        return None

    @property
    def busy(self) -> bool:
        """Whether an input waits."""
        return any(session.waiting for session in self.sessions.values())

    def step(self) -> None:
        """Answer one input of every session that waits."""
        groups: dict[Hashable, list[tuple[str, Session]]] = {}
        for name, session in self.sessions.items():
            if not session.waiting:
                continue
            if session.error is not None:
                number, _ = session.waiting.popleft()
                self.answer(Output(name, number, error=session.error))
                continue
            try:
                key = self.module.batch_key(session.state, session.waiting[0][1])
                groups.setdefault(key, []).append((name, session))
            except Exception as error:
                self._fail(session, error)
        for group in groups.values():
            for begin in range(0, len(group), self.max_batch):
                self._run(group[begin : begin + self.max_batch])

    def _run(self, group: list[tuple[str, Session]]) -> None:
        try:
            outputs = self.module.step([s.state for _, s in group], [s.waiting[0][1] for _, s in group])
            if len(outputs) != len(group):
                raise TypeError(f"step must give one output per session: {len(outputs)} for {len(group)}")
        except Exception as error:
            # A step changes the states, so that none of its sessions can go on.
            for _, session in group:
                self._fail(session, error)
            return
        for (name, session), values in zip(group, outputs, strict=True):
            number, _ = session.waiting.popleft()
            self.answer(Output(name, number, values=dict(values)))

    def _fail(self, session: Session, error: Exception) -> None:
        logger.error("a session failed", exc_info=error)
        session.error = describe(error)
        self._release(session)

    def _release(self, session: Session) -> None:
        """Give the session's state back, if it has one, whatever the module says to it."""
        state, session.state = session.state, None
        if state is None:
            return
        try:
            self.module.close(state)
        except Exception as error:
            logger.error("a session could not be closed", exc_info=error)


def run(settings: ModuleSettings, address: str) -> None:
    """Body of the process: load, say so, and serve until the front end has gone."""
    from omni_core.processes import die_with_parent

    die_with_parent()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)

    def send(reply: Reply) -> None:
        socket.send(ENCODER.encode(reply))

    try:
        module, loaded_with = _load(settings)
    except BaseException as error:
        send(Ready(str(error) if isinstance(error, OmniError) else describe(error)))
        socket.close(linger=5000)
        raise
    runner = ModuleRunner(module, loaded_with, send, settings.max_batch)
    send(Ready(cannot_sleep=module.cannot_sleep))
    del module  # the runner's alone, which may let go of it
    with torch.inference_mode():
        while True:
            runner.receive(REQUESTS.decode(socket.recv()))
            while True:
                while socket.poll(0):
                    runner.receive(REQUESTS.decode(socket.recv()))
                if not runner.busy:
                    break
                runner.step()


def _load(settings: ModuleSettings) -> tuple[StageModule[Any], ModuleContext]:
    torch.set_num_threads(settings.num_threads)
    importlib.import_module(settings.module.partition(":")[0])
    context = ModuleContext(
        checkpoint=Path(settings.checkpoint),
        device=torch.device(settings.device),
        dtype=getattr(torch, settings.dtype),
        options=settings.options,
    )
    module: StageModule[Any] = load_reference(settings.module).load(context)
    module.eval()
    return module, context
