"""Sleep and wake-up through the HTTP routes.

vLLM cannot put a CPU worker to sleep, so the engine is made up (module stages sleep on CPUs too, and do so in
``module/test_module_stage.py`` and ``test_speech_server.py``), at the border that ``omni_core.supervisor.Engine``
draws; supervisor, front end, routes and the encoding of files are the real ones. It sleeps as vLLM's does: ``abort``
ends the requests under way, ``wait`` lets them end.
"""

import asyncio
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from omni_core.diffusion.messages import Report
from omni_core.errors import ConfigError, GenerationCancelled
from omni_core.http.jobs import JobStore
from omni_core.http.stages import stage_router
from omni_core.http.videos import VideoService, video_router
from omni_core.requests import VideoRequest
from omni_core.runtime import VideoEngine
from omni_core.stages import SupervisedDiffusion
from omni_core.supervisor import SupervisedStage


class SmallRequest(VideoRequest):
    width: int = 16
    height: int = 16
    num_frames: int = 3
    fps: int = 8
    num_inference_steps: int = 2


class SleepyEngine:
    """Noise from the seed, a step each 10 ms."""

    stage, max_running = "diffusion", 2

    def __init__(self):
        self.calls, self.running, self.aborted, self.seeds = [], 0, False, {}

    def watch(self, on_death):
        """It does not die."""

    async def generate(self, job, request_id):
        assert not self.calls or self.calls[-1] == "awake", "work reached an engine that sleeps"
        steps = job.request["num_inference_steps"]
        self.seeds[request_id] = job.request["seed"]
        self.running += 1
        try:
            for step in range(steps):
                yield Report("denoise", step, steps)
                await asyncio.sleep(0.01)
                if self.aborted:
                    raise GenerationCancelled(f"stage {self.stage!r} aborted request {request_id}")
            yield Report("decode", steps, steps, result=request_id)
        finally:
            self.running -= 1

    def take(self, report):
        generator = np.random.default_rng(self.seeds[report.result])
        return generator.integers(0, 255, (3, 16, 16, 3), np.uint8)

    def discard(self, request_id):
        """Nothing was left."""

    def check_sleep(self, level):
        """It can."""

    async def sleep(self, level, mode):
        self.aborted = mode == "abort"
        while self.running:
            await asyncio.sleep(0.005)
        self.calls.append((level, mode))

    async def wake_up(self):
        self.aborted = False
        self.calls.append("awake")

    def close(self):
        """Nothing to stop."""


def with_server(work, folder):
    """Run ``work(http, engine)`` against the routes over a made-up engine."""

    async def run():
        engine = SleepyEngine()
        stage = SupervisedDiffusion(lambda: engine)
        stage.watch()
        store = JobStore(folder, ttl=60, limit=10)
        service = VideoService(VideoEngine(stage, SmallRequest, 4), store, ["m"], SimpleNamespace())
        app = FastAPI()
        app.include_router(stage_router({stage.stage: stage}))
        app.include_router(video_router(service))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            await work(http, engine)
        await service.close()
        stage.close()
        store.close()

    asyncio.run(run())


async def job_of(http, job, *statuses):
    async with asyncio.timeout(10):
        while (now := (await http.get(f"/v1/videos/{job['id']}")).json())["status"] not in statuses:
            await asyncio.sleep(0.01)
    return now


def test_a_stage_that_slept_gives_what_it_gave_before(tmp_path):
    async def work(http, engine):
        body = {"prompt": "a cat", "seed": 5}
        before = await http.post("/v1/videos/sync", json=body)
        assert before.status_code == 200
        slept = await http.post("/v1/omni/sleep")
        assert slept.status_code == 200 and slept.json()["stages"]["diffusion"]["state"] == "asleep"
        health = await http.get("/health")
        assert health.status_code == 200 and health.json()["stages"]["diffusion"]["state"] == "asleep"
        for path in ("/v1/videos", "/v1/videos/sync"):
            refused = await http.post(path, json=body)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "asleep; wake it up with POST /v1/omni/wakeup" in refused.json()["error"]["message"]
        woken = await http.post("/v1/omni/wakeup", json={"stages": ["diffusion"]})
        assert woken.status_code == 200 and woken.json()["stages"]["diffusion"]["state"] == "running"
        after = await http.post("/v1/videos/sync", json=body)
        assert after.status_code == 200 and after.content == before.content
        other = await http.post("/v1/videos/sync", json={**body, "seed": 6})
        assert other.content != before.content
        assert engine.calls == [(1, "abort"), "awake"]

    with_server(work, tmp_path)


@pytest.mark.parametrize(("mode", "status"), [("abort", "failed"), ("wait", "completed")])
def test_what_becomes_of_a_job_under_way(mode, status, tmp_path):
    async def work(http, engine):
        job = (await http.post("/v1/videos", json={"prompt": "a cat", "num_inference_steps": 60})).json()
        await job_of(http, job, "in_progress")
        slept = await http.post("/v1/omni/sleep", json={"mode": mode})
        assert slept.status_code == 200 and engine.running == 0
        ended = await job_of(http, job, "completed", "failed")
        assert ended["status"] == status
        if mode == "abort":
            assert "aborted" in ended["error"]["message"] and job["id"] in ended["error"]["message"]
        assert (await http.post("/v1/omni/wakeup")).status_code == 200
        assert (await http.post("/v1/videos/sync", json={"prompt": "a cat"})).status_code == 200

    with_server(work, tmp_path)


def test_a_request_while_the_stage_waits_to_sleep_is_refused(tmp_path):
    async def work(http, engine):
        job = (await http.post("/v1/videos", json={"prompt": "a cat", "num_inference_steps": 100})).json()
        await job_of(http, job, "in_progress")
        sleeping = asyncio.create_task(http.post("/v1/omni/sleep", json={"mode": "wait"}))
        await asyncio.sleep(0.05)
        refused = await http.post("/v1/videos/sync", json={"prompt": "a cat"})
        assert refused.status_code == 503 and engine.running == 1
        assert (await sleeping).status_code == 200
        assert (await job_of(http, job, "completed", "failed"))["status"] == "completed"

    with_server(work, tmp_path)


class Sleeper(SleepyEngine):
    """One of several, which writes down whose turn it is."""

    def __init__(self, stage, order, refuse=False):
        super().__init__()
        self.stage, self.order, self.refuse = stage, order, refuse

    def check_sleep(self, level):
        if self.refuse:
            raise ConfigError(f"stage {self.stage!r} cannot sleep: start it with --enable-sleep-mode")

    async def sleep(self, level, mode):
        self.order.append((self.stage, level, mode))

    async def wake_up(self):
        self.order.append(self.stage)


def with_stages(work, *names, refusing=()):
    """Run ``work(http, order)`` against the routes over made-up engines."""

    async def run():
        order = []
        stages = {name: SupervisedStage(lambda name=name: Sleeper(name, order, name in refusing)) for name in names}
        app = FastAPI()
        app.include_router(stage_router(stages))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            await work(http, order)

    asyncio.run(run())


def test_a_stage_that_cannot_sleep_is_refused_before_another_sleeps():
    async def work(http, order):
        answer = await http.post("/v1/omni/sleep", json={})
        assert answer.status_code == 400
        assert "'decoder' cannot sleep: start it with --enable-sleep-mode" in answer.json()["error"]["message"]
        assert order == [] and (await http.get("/health")).json()["stages"]["talker"]["state"] == "running"
        answer = await http.post("/v1/omni/sleep", json={"stages": ["talker"]})
        assert answer.status_code == 200 and order == [("talker", 1, "abort")]

    with_stages(work, "talker", "decoder", refusing=["decoder"])


def test_stages_wake_in_the_reverse_order():
    """The front one, which takes the requests, is the first to sleep and the last to wake."""

    async def work(http, order):
        slept = await http.post("/v1/omni/sleep", json={"mode": "wait"})
        assert {stage["state"] for stage in slept.json()["stages"].values()} == {"asleep"}
        woken = await http.post("/v1/omni/wakeup")
        assert {stage["state"] for stage in woken.json()["stages"].values()} == {"running"}
        names = ["talker", "decoder", "encoder"]
        assert order == [*((name, 1, "wait") for name in names), *reversed(names)]

    with_stages(work, "talker", "decoder", "encoder")


@pytest.mark.parametrize("path", ["/v1/omni/sleep", "/v1/omni/wakeup"])
def test_a_body_that_is_too_large_is_not_read(path):
    from fastapi.testclient import TestClient

    app = FastAPI()
    app.include_router(stage_router({}))
    answer = TestClient(app).post(path, content=b" " * (64 << 10) + b"{}")
    assert answer.status_code == 413 and "65536 bytes" in answer.json()["error"]["message"]
