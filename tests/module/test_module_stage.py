"""A module stage: sessions, batching, failure of one session, of a load, and of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import uvloop

from omni_core.errors import (
    ConfigError,
    EngineDied,
    GenerationCancelled,
    GenerationError,
    StageStartError,
    StageUnavailable,
)
from omni_core.module.client import ModuleEngine
from omni_core.module.contract import ModuleContext, StageModule
from omni_core.module.messages import Changed, Close, Open, Push, Sleep, WakeUp
from omni_core.module.process import ModuleRunner, ModuleSettings

FOLDER = Path(__file__).parent
CONTEXT = ModuleContext(FOLDER, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module", autouse=True)
def importable_in_children():
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{FOLDER}:{before}"
    sys.path.insert(0, str(FOLDER))
    yield
    os.environ["PYTHONPATH"] = before
    sys.path.remove(str(FOLDER))


def settings(**options):
    return ModuleSettings("sum", "echo_module:RunningSum", str(FOLDER), "cpu", "float32", options)


@pytest.fixture(scope="module")
def engine(importable_in_children):
    engine = ModuleEngine(settings())
    yield engine
    engine.close()
    assert not engine.process.is_alive()


def ones(count):
    return {"x": np.ones((count, 2), dtype=np.float32)}


def test_sessions_keep_their_own_state_and_share_steps(engine):
    async def run():
        async def one(count):
            session = engine.open()
            outputs = [await session.push(ones(count)) for _ in range(5)]
            session.close()
            return outputs

        return await asyncio.gather(*(one(count) for count in (1, 1, 1, 2, 3)))

    results = asyncio.run(run())
    for count, outputs in zip((1, 1, 1, 2, 3), results, strict=True):
        assert [output["sum"].tolist() for output in outputs] == [[count * n, count * n] for n in range(1, 6)]
    assert max(output["together"] for outputs in results for output in outputs) > 1
    assert all(output["together"] == 1 for outputs in results[3:] for output in outputs), "shapes differ"


class Lender(StageModule[list[str]]):
    """Keeps account of the states that it lends."""

    def __init__(self):
        super().__init__()
        self.lent, self.returned = [], []

    @classmethod
    def load(cls, context):
        return cls()

    def open(self, options):
        if options.get("refuse"):
            raise ValueError("this session is refused")
        self.lent.append([])
        return self.lent[-1]

    def close(self, state):
        self.returned.append(state)
        if len(self.returned) == 2:
            raise RuntimeError("what a module says to a closed session is nobody else's affair")

    def batch_key(self, state, values):
        return values["key"]

    def step(self, states, inputs):
        if inputs[0]["key"] == "fail":
            raise RuntimeError("the step fails")
        return [{} for _ in states]


def test_a_state_is_given_back_once():
    """Given sessions that are closed, fail, and fail before they are closed, then each state comes back, and once."""
    module, outputs = Lender(), []
    runner = ModuleRunner(module, CONTEXT, outputs.append, max_batch=4)
    for name, key in (("good", "x"), ("idle", None), ("bad", "fail")):
        runner.receive(Open(name, {}))
        if key:
            runner.receive(Push(name, 0, {"key": key}))
    runner.receive(Open("refused", {"refuse": True}))
    good, idle, bad = module.lent
    while runner.busy:
        runner.step()
    assert module.returned == [bad] and [output.error is None for output in outputs] == [True, False]
    for name in ("bad", "good", "idle", "refused", "good"):
        runner.receive(Close(name))
    assert [id(state) for state in module.returned] == [id(bad), id(good), id(idle)] and not runner.sessions


def test_a_failing_step_fails_its_sessions_only(engine):
    async def run():
        good, bad = engine.open(), engine.open()
        await good.push(ones(1))
        with pytest.raises(GenerationError, match="stage 'sum' failed: RuntimeError: the step fails"):
            await bad.push({**ones(4), "fail": True})
        with pytest.raises(GenerationError, match="the step fails"):
            await bad.push(ones(4))
        assert (await good.push(ones(1)))["sum"].tolist() == [2, 2]
        refused = engine.open({"refuse": True})
        with pytest.raises(GenerationError, match="this session is refused"):
            await refused.push(ones(1))
        for session in (good, bad, refused):
            session.close()

    asyncio.run(run())


def test_closing_a_session_cancels_what_waits_in_it(engine):
    async def run():
        session = engine.open()
        task = asyncio.create_task(session.push(ones(1)))
        await asyncio.sleep(0)
        session.close()
        session.close()
        await asyncio.wait([task])
        assert task.cancelled()
        other = engine.open()
        assert (await other.push(ones(1)))["sum"].tolist() == [1, 1]
        other.close()

    asyncio.run(run())


def test_what_cannot_travel_is_refused_before_it_is_sent(engine):
    async def run():
        session = engine.open()
        with pytest.raises(TypeError, match="cannot cross processes"):
            await session.push({"x": object()})
        session.close()

    asyncio.run(run())


def test_a_module_that_cannot_be_loaded_says_why():
    with pytest.raises(StageStartError, match=r"stage 'sum' cannot start: .* is no good"):
        ModuleEngine(settings(refuse=True))


def test_sockets_lie_in_a_folder_that_the_next_engine_sweeps_where_its_owner_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "omni-module-left"
    left.mkdir()
    (left / "owner.lock").touch()
    (left / "socket").touch()
    engine = ModuleEngine(settings())
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("omni-module-") and folder != left
    other = ModuleEngine(settings())
    assert folder.exists() and len(list(tmp_path.iterdir())) == 2
    engine.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_the_death_of_the_process_fails_what_waits():
    engine = ModuleEngine(settings())

    async def run():
        died = asyncio.Event()
        engine.watch(died.set)
        session = engine.open()
        os.kill(engine.process.pid, signal.SIGSTOP)
        task = asyncio.create_task(session.push(ones(1)))
        await asyncio.sleep(0.1)
        os.kill(engine.process.pid, signal.SIGKILL)
        await asyncio.wait_for(died.wait(), 10)
        with pytest.raises(EngineDied, match="stage 'sum' died"):
            await task
        with pytest.raises(EngineDied):
            engine.open()

    asyncio.run(run())
    engine.close()
    engine.close()


# Sleep


class Reloaded(Lender):
    """Drops its weights in its sleep, and is another object when it wakes."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def sleep(self):
        self.weight = None

    def wake_up(self, context):
        assert not torch.is_inference_mode_enabled() and context is CONTEXT
        return Reloaded()


def test_a_module_sleeps_only_without_sessions_and_may_come_back_as_another():
    answers = []
    runner = ModuleRunner(module := Reloaded(), CONTEXT, answers.append, max_batch=4)
    with torch.inference_mode():
        runner.receive(WakeUp())
        runner.receive(Open("one", {}))
        runner.receive(Sleep())
        assert answers == [Changed(), Changed("1 sessions are open")] and module.weight is not None
        runner.receive(Close("one"))
        runner.receive(Sleep())
        runner.receive(Sleep())
        assert answers[2:] == [Changed(), Changed()] and runner.module is module and module.weight is None
        runner.receive(Open("early", {}))
        assert "the module is asleep" in runner.sessions["early"].error and not module.lent[1:]
        runner.receive(Close("early"))
        runner.receive(WakeUp())
        assert runner.module is not module and not runner.module.training and runner.module.weight is not None
        runner.receive(Open("two", {}))
        assert runner.module.lent == [[]]


def test_parameters_and_buffers_are_what_moves():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mean", torch.ones(2))
    moves = []
    module.to = lambda device: moves.append(str(device)) or module
    StageModule.sleep(module)
    assert StageModule.wake_up(module, ModuleContext(FOLDER, torch.device("meta"), torch.float32)) is module
    assert moves == ["cpu", "meta"]


def test_sleep_aborts_the_open_sessions(engine):
    async def run():
        idle, busy = engine.open(), engine.open()
        await idle.push(ones(1))
        os.kill(engine.process.pid, signal.SIGSTOP)
        push = asyncio.create_task(busy.push(ones(1)))
        await asyncio.sleep(0.05)
        sleeping = asyncio.create_task(engine.sleep(1, "abort"))
        with pytest.raises(GenerationCancelled, match="stage 'sum' aborted the request: it was put to sleep"):
            await push
        os.kill(engine.process.pid, signal.SIGCONT)
        await sleeping
        with pytest.raises(GenerationCancelled, match="put to sleep"):
            await idle.push(ones(1))
        idle.close()
        busy.close()
        await engine.wake_up()
        await engine.wake_up()
        session = engine.open()
        assert (await session.push(ones(3)))["sum"].tolist() == [3, 3]
        session.close()

    asyncio.run(run())


def test_sleep_can_wait_for_the_open_sessions_and_be_given_up(engine):
    async def run():
        session = engine.open()
        sleeping = asyncio.create_task(engine.sleep(1, "wait"))
        assert (await session.push(ones(1)))["sum"].tolist() == [1, 1]
        await asyncio.sleep(0.05)
        assert not sleeping.done()
        sleeping.cancel()
        await asyncio.wait([sleeping])
        assert (await session.push(ones(1)))["sum"].tolist() == [2, 2]
        sleeping = asyncio.create_task(engine.sleep(1, "wait"))
        await asyncio.sleep(0)
        session.close()
        await asyncio.wait_for(sleeping, 10)
        await engine.wake_up()

        os.kill(engine.process.pid, signal.SIGSTOP)
        sleeping = asyncio.create_task(engine.sleep(1, "wait"))
        await asyncio.sleep(0.05)
        sleeping.cancel()  # when the message is on its way
        await asyncio.wait([sleeping])
        os.kill(engine.process.pid, signal.SIGCONT)
        session = engine.open()
        assert (await session.push(ones(1)))["sum"].tolist() == [1, 1], "nobody would have woken it"
        session.close()
        await engine.sleep(1, "wait")
        await engine.wake_up()

    asyncio.run(run())


def with_engine(work, **options):
    engine = ModuleEngine(settings(**options))

    async def run():
        await work(engine)
        session = engine.open()
        assert (await session.push(ones(1)))["sum"].tolist() == [1, 1]
        session.close()

    try:
        asyncio.run(run())
    finally:
        engine.close()


def test_a_module_says_why_it_cannot_sleep_and_stays_awake():
    async def work(engine):
        for level, message in ((1, "stage 'sum' cannot sleep: its weights are nailed down"), (2, "level 1 alone")):
            with pytest.raises(ConfigError, match=message):
                engine.check_sleep(level)
            with pytest.raises(ConfigError, match=message):
                await engine.sleep(level, "abort")

    with_engine(work, trouble="cannot")


def test_a_module_that_fails_to_fall_asleep_is_awake():
    async def work(engine):
        with pytest.raises(GenerationError, match="stage 'sum' cannot sleep: MemoryError: no room in the host"):
            await engine.sleep(1, "abort")

    with_engine(work, trouble="sleep")


def test_a_module_that_fails_to_wake_up_is_woken_again():
    async def work(engine):
        await engine.sleep(1, "abort")
        with pytest.raises(StageUnavailable, match="stage 'sum' cannot wake up: MemoryError: no room on the device"):
            await engine.wake_up()
        await engine.wake_up()

    with_engine(work, trouble="wake")


def test_death_ends_the_wait_for_sleep():
    engine = ModuleEngine(settings())

    async def run():
        engine.watch(lambda: None)
        os.kill(engine.process.pid, signal.SIGSTOP)
        sleeping = asyncio.create_task(engine.sleep(1, "abort"))
        await asyncio.sleep(0.05)
        os.kill(engine.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(sleeping, 10)

    asyncio.run(run())
    engine.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_engine_that_is_closed_leaves_nothing_on_the_loop_that_would_deafen_later_connections(run):
    """File descriptors are numbers that come back: one still watched for the engine would be some client's."""

    async def answer(reader, writer):
        writer.write(await reader.readexactly(1))
        writer.close()

    async def ask(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(), 5) == b"x"
        writer.close()

    async def work():
        engine = ModuleEngine(settings())
        engine.watch(lambda: None)
        session = engine.open()
        await session.push(ones(1))
        session.close()
        os.kill(engine.process.pid, signal.SIGKILL)
        await asyncio.to_thread(engine.close)
        await asyncio.sleep(0)
        assert engine._context.closed and engine._socket.closed
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        await asyncio.gather(*(ask(server.sockets[0].getsockname()[1]) for _ in range(30)))
        server.close()

    run(work())
