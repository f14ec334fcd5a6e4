"""The whole engine: processes, transport, results, aborts, with the toy family, on both executors."""

import asyncio
import os

import numpy as np
import psutil
import pytest
from reference import toy_video

from omni_core.errors import ConfigError, GenerationError
from omni_core.runtime import VideoEngine

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module", params=[("uni", False), ("mp", False), ("uni", True), ("mp", True)], ids=str)
def stage(request, resolve_toy):
    """An engine of each executor, without and with run-ahead."""
    pytest.importorskip("vllm")
    from omni_core.vllm.diffusion.engine import DiffusionEngine

    before = dict(os.environ)
    loop = asyncio.new_event_loop()
    executor, ahead = request.param
    resolved = resolve_toy(distributed_executor_backend=executor, async_scheduling=ahead)
    engine = loop.run_until_complete(start(DiffusionEngine, resolved))
    assert engine.client.vllm_config.max_concurrent_batches == (2 if ahead else 1)
    engine.loop = loop
    assert "OMNI_PLUGIN_SET" not in os.environ, "later processes are not Omni's"
    yield engine
    own = [child for child in psutil.Process().children() if "EngineCore" in child.name()]
    children = [process for child in own for process in (child, *child.children(recursive=True))]
    assert children
    loop.run_until_complete(asyncio.to_thread(engine.close))
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    assert not engine.results.path.exists()
    os.environ.clear()
    os.environ.update(before)


async def start(cls, resolved):
    return cls(resolved)


@pytest.fixture
def engine(stage):
    from omni_plugin_toy.family import ToyRequest

    return VideoEngine(stage, ToyRequest, max_queued=3)


def run(stage, work):
    return stage.loop.run_until_complete(asyncio.wait_for(work, 60))


async def generate(engine, prompt, seed, **fields):
    request = engine.parse({"prompt": prompt, "seed": seed, **fields})
    return await engine.generate(request, frame_type="float32")


def test_a_request_gives_what_the_model_gives_with_progress(stage, engine):
    seen = []

    async def work():
        request = engine.parse({"prompt": "a cat", "seed": 7, "num_inference_steps": 6, "step_seconds": 0.02})
        return await engine.generate(request, frame_type="float32", progress=seen.append)

    output = run(stage, work())
    np.testing.assert_array_equal(output.frames, toy_video("a cat", 7, steps=6))
    assert output.fps == 8
    steps = [progress.step for progress in seen]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 3, f"progress came while it ran: {steps}"
    assert stage.results.pending() == []


def test_requests_at_once_give_what_each_gives_alone_and_share_forwards(stage, engine):
    async def work():
        await stage.stats(reset=True)
        slow = {"step_seconds": 0.01}  # so that all have come long before the first ends
        requests = [generate(engine, f"p{i}", i, num_inference_steps=60 + i, **slow) for i in range(4)]
        outputs = await asyncio.gather(*requests)
        return outputs, await stage.stats()

    outputs, stats = run(stage, work())
    for i, output in enumerate(outputs):
        np.testing.assert_array_equal(output.frames, toy_video(f"p{i}", i, steps=60 + i))
    assert stats["forwards"].get("4", 0) >= 10, stats


def test_cancelling_frees_the_worker_at_once(stage, engine):
    async def work():
        task = asyncio.create_task(generate(engine, "slow", 1, num_inference_steps=1000, step_seconds=0.05))
        while (await stage.stats())["running"] == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        return await stage.stats()

    assert run(stage, work())["running"] == 0
    assert engine.active == 0
    assert stage.results.pending() == []


def test_a_failing_request_names_stage_and_request_and_leaves_the_engine_healthy(stage, engine):
    async def work():
        good = asyncio.create_task(generate(engine, "good", 1, num_inference_steps=30))
        with pytest.raises(GenerationError, match=r"video-[0-9a-f]{32} failed in stage 'diffusion': .*asked to fail"):
            await generate(engine, "bad", 2, fail_in="predict", fail_at=2)
        return await good

    np.testing.assert_array_equal(run(stage, work()).frames, toy_video("good", 1, steps=30))


def test_requests_that_come_end_fail_and_leave_do_not_touch_each_other(stage, engine):
    async def work():
        slow = {"step_seconds": 0.005}
        kept = [asyncio.create_task(generate(engine, "long", 1, num_inference_steps=40, **slow))]
        await asyncio.sleep(0.05)
        left = asyncio.create_task(generate(engine, "left", 2, num_inference_steps=500, **slow))
        failing = asyncio.create_task(
            generate(engine, "bad", 3, num_inference_steps=20, fail_in="advance", fail_at=7, **slow)
        )
        await asyncio.sleep(0.05)
        kept.append(asyncio.create_task(generate(engine, "late", 4, num_inference_steps=9, num_frames=9, **slow)))
        left.cancel()
        with pytest.raises(GenerationError, match="asked to fail in advance"):
            await failing
        return [await task for task in kept], await stage.stats()

    (long, late), stats = run(stage, work())
    np.testing.assert_array_equal(long.frames, toy_video("long", 1, steps=40))
    np.testing.assert_array_equal(late.frames, toy_video("late", 4, steps=9, frames=9))
    assert stats["running"] == 0 and stage.results.pending() == []
    assert long.seconds["denoise"] >= 40 * 0.005, long.seconds


def test_seconds_and_frames_of_a_finished_request_are_not_kept(stage, engine):
    run(stage, generate(engine, "a cat", 7))
    assert run(stage, stage.stats())["running"] == 0


def test_ray_is_refused_where_vllm_has_no_resource_for_the_device(resolve_toy):
    from omni_core.vllm.diffusion.engine import engine_arguments

    with pytest.raises(ConfigError, match=r"'diffusion' cannot run its workers on Ray: .*'cpu' names none; use .* mp"):
        engine_arguments(resolve_toy(distributed_executor_backend="ray"), "unused")
