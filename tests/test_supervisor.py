"""A stage that dies is started again with back-off; its requests fail at once, and only they."""

import asyncio

import pytest

from omni_core.diffusion.messages import Job, Report
from omni_core.errors import EngineDied, GenerationError, StageStartError, StageUnavailable
from omni_core.stages import SupervisedDiffusion, SupervisedModule


class FakeEngine:
    """An engine whose requests never end and whose death a test decides."""

    stage = "diffusion"
    max_running = 2

    def __init__(self):
        self.closed = False
        self.slept = []

    def watch(self, on_death):
        self.die = on_death

    async def generate(self, job, request_id):
        yield Report("denoise", 1, 2, totals={"steps": 1})
        await asyncio.Event().wait()

    async def sleep(self, level, mode):
        self.slept.append((level, mode))

    async def wake_up(self):
        self.slept.append("awake")

    def discard(self, request_id):
        """Nothing was left."""

    def close(self):
        self.closed = True


class Starter:
    """Starts fake engines; the starts numbered in ``failing`` fail."""

    def __init__(self, *failing):
        self.engines, self.count, self.failing = [], 0, failing

    def __call__(self):
        self.count += 1
        if self.count in self.failing:
            raise StageStartError("no device")
        self.engines.append(FakeEngine())
        return self.engines[-1]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("omni_core.supervisor.FIRST_DELAY", 0.05)


async def until(predicate):
    async with asyncio.timeout(5):
        while not predicate():
            await asyncio.sleep(0.01)


async def follow(stage):
    return [report async for report in stage.generate(Job({}), "r1")]


def test_requests_in_a_stage_that_dies_fail_at_once_and_it_is_started_again():
    async def work():
        start = Starter()
        stage = SupervisedDiffusion(start)
        request = asyncio.create_task(follow(stage))
        await asyncio.sleep(0.02)
        start.engines[0].die()
        with pytest.raises(GenerationError, match="stage 'diffusion' died while request r1 was in it"):
            await asyncio.wait_for(request, 1)
        await until(lambda: stage.state == "running")
        assert start.engines[0].closed and not start.engines[1].closed
        assert stage.status() == {"state": "running", "restarts": 1, "reason": None}
        start.engines[1].die()
        with pytest.raises(StageUnavailable, match="restarting: its process ended"):
            await follow(stage)
        await until(lambda: stage.restarts == 2 and stage.state == "running")
        stage.close()

    asyncio.run(work())


def test_a_start_that_fails_is_tried_again_later_with_the_reason():
    async def work():
        start = Starter(2, 3)
        stage = SupervisedDiffusion(start)
        stage.watch()
        start.engines[0].die()
        await until(lambda: "start 2 failed, the next is in 0.1 s: no device" in stage.reason)
        await until(lambda: stage.state == "running")
        assert start.count == 4
        stage.close()

    asyncio.run(work())


def test_a_loop_that_has_lost_its_threads_starts_nothing_again():
    """As when a script is interrupted: asyncio shuts its executor down, and processes end with the script."""

    async def work():
        start = Starter()
        stage = SupervisedDiffusion(start)
        stage.watch()
        await asyncio.get_running_loop().shutdown_default_executor()
        start.engines[0].die()
        await until(lambda: stage.state == "stopped")
        await asyncio.sleep(0.2)
        assert start.count == 1 and stage.restarts == 1
        with pytest.raises(StageUnavailable, match="no event loop any more"):
            await follow(stage)
        stage.close()

    asyncio.run(work())


def test_closing_ends_requests_and_restarts():
    async def work():
        start = Starter()
        stage = SupervisedDiffusion(start)
        request = asyncio.create_task(follow(stage))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(stage.close)
        with pytest.raises(StageUnavailable, match="was stopped"):
            await asyncio.wait_for(request, 1)
        assert start.engines[0].closed
        start.engines[0].die()
        await asyncio.sleep(0.05)
        assert start.count == 1
        with pytest.raises(StageUnavailable, match="stopped"):
            await follow(stage)

    asyncio.run(work())


def test_closing_while_it_is_restarted_leaves_no_engine():
    async def work():
        start = Starter(2)
        stage = SupervisedDiffusion(start)
        stage.watch()
        start.engines[0].die()
        await until(lambda: "failed" in stage.reason)
        stage.close()
        await asyncio.sleep(0.3)
        assert all(engine.closed for engine in start.engines)

    asyncio.run(work())


def test_a_stage_that_sleeps_refuses_requests_until_it_is_woken():
    async def work():
        start = Starter()
        stage = SupervisedDiffusion(start)
        await stage.sleep(1, "wait")
        with pytest.raises(StageUnavailable, match="asleep; wake it up with POST /v1/omni/wakeup"):
            await follow(stage)
        await stage.wake_up()
        await stage.wake_up()
        assert start.engines[0].slept == [(1, "wait"), "awake"]
        stage.close()

    asyncio.run(work())


class SlowEngine(FakeEngine):
    """It falls asleep and wakes when a test says so; what is asked of one that has died is never answered."""

    def __init__(self):
        super().__init__()
        self.may = asyncio.Event()

    async def sleep(self, level, mode):
        await self.may.wait()
        await super().sleep(level, mode)

    async def wake_up(self):
        await self.may.wait()
        await super().wake_up()


def test_a_stage_that_is_woken_while_it_waits_to_sleep_ends_awake():
    """vLLM's would sleep as soon as it is idle, woken or not."""

    async def work():
        engine = SlowEngine()
        stage = SupervisedDiffusion(lambda: engine)
        sleeping = asyncio.create_task(stage.sleep(1, "wait"))
        await asyncio.sleep(0.01)
        with pytest.raises(StageUnavailable, match="asleep"):
            await stage.sleep(1, "wait")
        waking = [asyncio.create_task(stage.wake_up()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert stage.state == "asleep" and engine.slept == []
        engine.may.set()
        await asyncio.gather(sleeping, *waking)
        assert stage.state == "running" and engine.slept == [(1, "wait"), "awake"]
        stage.close()

    asyncio.run(work())


@pytest.mark.parametrize("change", ["sleep", "wake_up"])
def test_a_stage_that_dies_while_it_falls_asleep_or_wakes_is_started_again(change):
    async def work():
        engines = [SlowEngine(), FakeEngine()]
        first = engines[0]
        stage = SupervisedDiffusion(lambda: engines.pop(0))
        if change == "wake_up":
            first.may.set()
            await stage.sleep(1, "abort")
            first.may.clear()
        changing = asyncio.create_task(stage.sleep(1, "wait") if change == "sleep" else stage.wake_up())
        await asyncio.sleep(0.01)
        first.die()
        with pytest.raises(StageUnavailable, match="ended while"):
            await asyncio.wait_for(changing, 1)
        await until(lambda: stage.state == "running")
        assert stage.restarts == 1 and first.closed and not engines
        await stage.sleep(1, "abort")
        await stage.wake_up()
        stage.close()

    asyncio.run(work())


def test_a_stage_that_dies_as_it_wakes_is_not_taken_for_awake():
    async def work():
        class Engine(FakeEngine):
            async def wake_up(self):
                self.die()

        engines = [Engine(), FakeEngine()]
        stage = SupervisedDiffusion(lambda: engines.pop(0))
        await stage.sleep(1, "abort")
        with pytest.raises(StageUnavailable):
            await stage.wake_up()
        await until(lambda: stage.state == "running")
        assert stage.restarts == 1 and not engines
        stage.check_available()
        stage.close()

    asyncio.run(work())


def test_whatever_goes_wrong_in_a_restart_it_is_tried_again():
    async def work():
        class Engine(FakeEngine):
            def close(self):
                raise KeyError("what was never there")

        engines = [Engine(), EOFError("a pipe was closed"), FakeEngine()]

        def start():
            if isinstance(engine := engines.pop(0), Exception):
                raise engine
            return engine

        stage = SupervisedDiffusion(start)
        stage.watch()
        stage._engine.die()
        await until(lambda: stage.state == "running")
        assert stage.restarts == 2
        stage.close()

    asyncio.run(work())


def test_cancelling_a_request_closes_its_iterator():
    async def work():
        closed = asyncio.Event()

        class Engine(FakeEngine):
            async def generate(self, job, request_id):
                try:
                    yield Report("denoise", 1, 2)
                    await asyncio.Event().wait()
                finally:
                    closed.set()

        stage = SupervisedDiffusion(Engine)
        request = asyncio.create_task(follow(stage))
        await asyncio.sleep(0.02)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert closed.is_set()
        stage.close()

    asyncio.run(work())


def test_work_of_an_engine_that_died_leaves_the_one_after_it_alone(monkeypatch):
    """A request that waits elsewhere notices the death when it comes back, maybe long after the restart."""

    class FakeSession:
        id = "s1"

        async def push(self, values):
            raise EngineDied("stage 'diffusion' is dead")

    async def work():
        monkeypatch.setattr(FakeEngine, "open", lambda engine, options: FakeSession(), raising=False)
        start = Starter()
        stage = SupervisedModule(start)
        session = stage.open(request_id="speech-1")
        start.engines[0].die()
        with pytest.raises(GenerationError, match="stage 'diffusion' died while request speech-1 was in it"):
            await session.push({})
        await until(lambda: stage.state == "running")
        with pytest.raises(GenerationError, match="stage 'diffusion' died"):
            await session.push({})
        assert (stage.state, stage.restarts, len(start.engines)) == ("running", 1, 2)
        with pytest.raises(EngineDied, match="died while request speech-2 was in it"):  # of the engine that runs: news
            await stage.open(request_id="speech-2").push({})
        assert stage.state == "restarting"
        await until(lambda: stage.state == "running")
        stage.close()

    asyncio.run(work())
