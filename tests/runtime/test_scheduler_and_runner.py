"""Contract of the diffusion scheduler and runner with the installed vLLM: both driven step by step in this process."""

import gc
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from reference import toy_video

from omni_core.diffusion.messages import Job, StageSettings
from omni_core.diffusion.results import ResultFolder

vllm = pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface  # noqa: E402
from vllm.v1.engine import EngineCoreRequest, FinishReason  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from omni_core.vllm.diffusion.engine import engine_arguments  # noqa: E402
from omni_core.vllm.diffusion.runner import DiffusionModelRunner  # noqa: E402
from omni_core.vllm.diffusion.scheduler import DiffusionScheduler  # noqa: E402


class Loop:
    """What EngineCore does in a step, without its processes."""

    def __init__(self, vllm_config, results):
        self.results = results
        self.scheduler = DiffusionScheduler(
            vllm_config=vllm_config,
            kv_cache_config=None,
            structured_output_manager=None,
            block_size=16,
            hash_block_size=16,
            include_finished_set=True,
            log_stats=True,
        )
        self.runner = DiffusionModelRunner(vllm_config, torch.device("cpu"), rank=0)
        self.runner.load_model()
        self.outputs = {}
        self.count = 0

    def add(self, prompt, seed, frame_type="float32", **fields):
        self.count += 1
        request_id = f"r{self.count}"
        job = Job({"prompt": prompt, "seed": seed, **fields}, frame_type)
        self.add_raw(request_id, job.to_extra_args())
        return request_id

    def add_raw(self, request_id, extra_args):
        core = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=10, extra_args=extra_args),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.scheduler.add_request(Request.from_engine_core_request(core, None))

    def step(self):
        return self.collect(*self.enqueue())

    def enqueue(self):
        scheduled = self.scheduler.schedule()
        output = self.runner.execute_model(scheduled)
        return scheduled, output if output is not None else self.runner.sample_tokens(None)

    def collect(self, scheduled, output):
        return self.update(scheduled, output.get_output())

    def update(self, scheduled, output):
        by_client = self.scheduler.update_from_output(scheduled, output)
        step = {o.request_id: o for outputs in by_client.values() for o in outputs.outputs}
        for request_id, output in step.items():
            self.outputs.setdefault(request_id, []).append(output)
        return step

    def run(self, limit=200):
        while self.scheduler.has_requests():
            self.step()
            limit -= 1
            assert limit, "the requests do not end"

    def run_ahead(self, between=lambda queue: None):
        """As EngineCore runs ahead: two steps in flight, collected in order on a thread of their own."""
        queue = deque()
        with ThreadPoolExecutor(1) as collector:
            while queue or self.scheduler.has_requests():
                if self.scheduler.has_requests():
                    scheduled, output = self.enqueue()
                    queue.append((scheduled, collector.submit(output.get_output)))
                if len(queue) == 2 or not self.scheduler.has_requests():
                    between(queue)
                    scheduled, coming = queue.popleft()
                    self.update(scheduled, coming.result())

    def last(self, request_id):
        return self.outputs[request_id][-1]

    def frames(self, request_id):
        return self.results.take(self.last(request_id).kv_transfer_params["result"])


@pytest.fixture(scope="module")
def vllm_config(resolve_toy, tmp_path_factory):
    from omni_core.vllm.activate import activate

    activate()
    return AsyncEngineArgs(
        **engine_arguments(resolve_toy(), str(tmp_path_factory.mktemp("unused")))
    ).create_engine_config()


@pytest.fixture
def loop(vllm_config, tmp_path):
    results = ResultFolder(tmp_path)
    settings = StageSettings.from_config(vllm_config.additional_config)
    vllm_config.additional_config = StageSettings(**{**vars(settings), "results": str(results.path)}).to_config()
    yield Loop(vllm_config, results)
    results.close()


def test_the_scheduler_implements_all_of_the_installed_interface():
    assert not DiffusionScheduler.__abstractmethods__
    required = SchedulerInterface.__abstractmethods__
    assert all(name in vars(DiffusionScheduler) for name in required)


def test_one_request_gives_what_the_model_gives(loop):
    request_id = loop.add("a cat", 7)
    loop.run()
    np.testing.assert_array_equal(loop.frames(request_id), toy_video("a cat", 7))
    assert loop.last(request_id).finish_reason == FinishReason.STOP
    assert not loop.runner.running, "the worker keeps nothing"
    assert loop.results.pending() == []


@pytest.mark.parametrize(("prompt", "seed", "steps"), [("a cat", 8, 4), ("a dog", 7, 4), ("a cat", 7, 3)])
def test_another_seed_prompt_or_step_count_gives_another_video(loop, prompt, seed, steps):
    request_id = loop.add("a cat", 7)
    loop.run()
    assert np.abs(loop.frames(request_id) - toy_video(prompt, seed, steps=steps)).max() > 1e-3


def test_progress_counts_every_step(loop):
    request_id = loop.add("a cat", 7, num_inference_steps=5)
    loop.run()
    reports = [output.kv_transfer_params for output in loop.outputs[request_id]]
    assert [(r["phase"], r["step"]) for r in reports] == [*[("denoise", i) for i in range(1, 6)], *[("decode", 5)] * 5]
    assert {r["num_steps"] for r in reports} == {5}
    assert set(reports[-1]["seconds"]) == {"encode", "denoise", "decode"}


def test_late_requests_share_forwards_at_different_timesteps(loop):
    first = loop.add("a cat", 1, num_inference_steps=6)
    loop.step(), loop.step()
    second = loop.add("a dog", 2, num_inference_steps=3)
    loop.run()
    assert [2, 0] in loop.runner.model.batches, "the late one joins at its own step"
    np.testing.assert_array_equal(loop.frames(first), toy_video("a cat", 1, steps=6))
    np.testing.assert_array_equal(loop.frames(second), toy_video("a dog", 2, steps=3))


def test_requests_that_cannot_share_run_as_groups_of_one_step(loop):
    ids = [
        loop.add("a", 1, num_inference_steps=8),
        loop.add("b", 2, num_inference_steps=8, group="b"),
        loop.add("c", 3, num_inference_steps=8, width=64, height=16),
        loop.add("d", 4, num_inference_steps=8),
    ]
    while len(loop.runner.running) < 4 or any(r.state is None for r in loop.runner.running.values()):
        loop.step()
    before = len(loop.runner.model.batches)
    loop.step()
    assert sorted(len(batch) for batch in loop.runner.model.batches[before:]) == [1, 1, 2]
    loop.run()
    np.testing.assert_array_equal(loop.frames(ids[2]), toy_video("c", 3, steps=8, width=64, height=16))
    np.testing.assert_array_equal(loop.frames(ids[3]), toy_video("d", 4, steps=8))


def test_more_requests_than_slots_wait_their_turn(loop):
    ids = [loop.add(f"prompt {i}", i) for i in range(7)]
    loop.step()
    assert loop.scheduler.get_request_counts() == (4, 3)
    loop.run()
    for i, request_id in enumerate(ids):
        np.testing.assert_array_equal(loop.frames(request_id), toy_video(f"prompt {i}", i))


@pytest.mark.parametrize("where", ["start", "predict", "advance", "decode"])
def test_an_exception_fails_its_own_request_only(loop, where):
    good = loop.add("a cat", 1)
    bad = loop.add("a dog", 2, fail_in=where, fail_at=1 if where in ("predict", "advance") else 0)
    late = loop.add("a bird", 3)
    loop.run()
    report = loop.last(bad)
    assert report.finish_reason == FinishReason.ERROR
    assert f"asked to fail in {where}" in report.kv_transfer_params["error"]
    np.testing.assert_array_equal(loop.frames(good), toy_video("a cat", 1))
    np.testing.assert_array_equal(loop.frames(late), toy_video("a bird", 3))
    assert not loop.runner.running


def test_an_abort_is_seen_before_the_next_step_and_leaves_the_others(loop):
    keep, drop = loop.add("a cat", 1, num_inference_steps=6), loop.add("a dog", 2, num_inference_steps=6)
    for _ in range(3):
        loop.step()
    loop.scheduler.finish_requests([drop], RequestStatus.FINISHED_ABORTED)
    step = loop.step()
    assert set(step) == {keep}
    assert set(loop.runner.running) == {keep}
    loop.run()
    np.testing.assert_array_equal(loop.frames(keep), toy_video("a cat", 1, steps=6))


def test_work_queued_for_an_aborted_request_never_starts(loop):
    ids = [loop.add(f"p{i}", i) for i in range(5)]
    loop.step()
    loop.scheduler.finish_requests(ids[4], RequestStatus.FINISHED_ABORTED)
    loop.run()
    assert ids[4] not in loop.outputs
    assert loop.scheduler.get_num_unfinished_requests() == 0


def test_a_result_that_nobody_takes_is_removed(loop):
    request_id = loop.add("a cat", 1, num_inference_steps=1, num_frames=1)
    loop.step()
    scheduled, output = loop.enqueue()
    output = output.get_output()  # decoded and written
    assert loop.results.pending() == [f"{request_id}.npy"]
    loop.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
    loop.scheduler.update_from_output(scheduled, output)
    assert loop.results.pending() == []


def test_an_abort_that_comes_after_the_end_removes_the_result(loop):
    request_id = loop.add("a cat", 1)
    loop.run()
    assert loop.results.pending() == [f"{request_id}.npy"]
    loop.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
    assert loop.results.pending() == []


def test_a_request_that_is_not_omnis_own_fails_alone(loop):
    loop.add_raw("foreign", None)
    good = loop.add("a cat", 1)
    loop.run()
    assert loop.last("foreign").finish_reason == FinishReason.ERROR
    np.testing.assert_array_equal(loop.frames(good), toy_video("a cat", 1))


def test_pausing_keeps_running_requests_where_they_are(loop):
    request_id = loop.add("a cat", 1)
    loop.step()
    loop.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not loop.scheduler.has_requests()
    assert loop.step() == {}
    loop.scheduler.set_pause_state(PauseState.UNPAUSED)
    loop.run()
    np.testing.assert_array_equal(loop.frames(request_id), toy_video("a cat", 1))


def test_frames_come_as_bytes_where_asked(loop):
    request_id = loop.add("a cat", 1, frame_type="uint8")
    loop.run()
    frames = loop.frames(request_id)
    assert frames.dtype == np.uint8
    np.testing.assert_array_equal(frames, np.rint(toy_video("a cat", 1) * 255).astype(np.uint8))


def test_no_space_for_a_result_fails_the_request_and_says_what_to_do(loop, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    request_id = loop.add("a cat", 1)
    loop.run()
    assert "OMNI_RESULTS_DIR" in loop.last(request_id).kv_transfer_params["error"]
    monkeypatch.undo()
    assert loop.results.pending() == []


def test_a_long_decode_is_chunked_and_stalls_nobody(loop):
    long = loop.add("a cat", 1, num_inference_steps=1, num_frames=41)
    other = loop.add("a dog", 2, num_inference_steps=60)
    loop.run()
    decoding = [i for i, output in enumerate(loop.outputs[long]) if output.kv_transfer_params["phase"] == "decode"]
    assert len(decoding) == 41, "one frame a chunk"
    np.testing.assert_array_equal(loop.frames(long), toy_video("a cat", 1, steps=1, frames=41))
    np.testing.assert_array_equal(loop.frames(other), toy_video("a dog", 2, steps=60))
    assert len(loop.outputs[other]) < 60 + 10, "it took a step in every engine step"


def test_others_take_steps_between_the_pieces_of_a_long_preparation(loop):
    other = loop.add("a dog", 2, num_inference_steps=30)
    loop.step()
    long = loop.add("a cat", 1, pieces=8)
    loop.run()
    phases = [output.kv_transfer_params["phase"] for output in loop.outputs[long]]
    assert phases[:9] == ["encode"] * 8 + ["denoise"], "started with the first piece, denoised with the last"
    assert len(loop.outputs[other]) == 30 + 5, "it took a step in every engine step until its five chunks"
    np.testing.assert_array_equal(loop.frames(long), toy_video("a cat", 1))
    np.testing.assert_array_equal(loop.frames(other), toy_video("a dog", 2, steps=30))


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_a_preparation_that_ends_midway_leaves_nothing(loop, end):
    other = loop.add("a dog", 2, num_inference_steps=30)
    request_id = loop.add("a cat", 1, pieces=50, **({"fail_in": "prepare", "fail_at": 3} if end == "failure" else {}))
    for _ in range(4):
        loop.step()
    assert loop.runner.model.preparing == 1
    if end == "abort":
        loop.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
    loop.step()
    gc.collect()
    assert loop.runner.model.preparing == 0, "its iterator is gone"
    loop.run()
    if end == "failure":
        assert "asked to fail in prepare" in loop.last(request_id).kv_transfer_params["error"]
    np.testing.assert_array_equal(loop.frames(other), toy_video("a dog", 2, steps=30))
    assert loop.results.pending() == [] and not loop.runner.running


def test_an_abort_while_decoding_leaves_nothing(loop):
    request_id = loop.add("a cat", 1, num_inference_steps=1, num_frames=41)
    for _ in range(5):
        loop.step()
    assert loop.results.pending() == [f"{request_id}.partial"]
    loop.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
    loop.run()
    assert loop.results.pending() == [] and not loop.runner.running


def test_small_requests_take_many_steps_for_one_of_a_large_one(loop):
    """Sixteen times the latents, sixteen times the cost: both get half of the device."""
    large = loop.add("a cat", 1, num_inference_steps=6, width=128, height=128)
    small = loop.add("a dog", 2, num_inference_steps=40)
    while not loop.outputs.get(small) or loop.outputs[small][-1].kv_transfer_params["step"] < 33:
        loop.step()
    assert loop.outputs[large][-1].kv_transfer_params["step"] == 4, (
        "the first before the small one came, then one for every sixteen"
    )
    loop.run()
    np.testing.assert_array_equal(loop.frames(large), toy_video("a cat", 1, steps=6, width=128, height=128))
    np.testing.assert_array_equal(loop.frames(small), toy_video("a dog", 2, steps=40))


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("start", lambda request: None, "start must return a DiffusionState"),
        ("batch_key", lambda state: [], "unhashable"),
        ("predict", lambda states: [], "one tensor per state"),
        ("cost", lambda state: 1 / 0, "division by zero"),
        ("decode", lambda state: iter([torch.zeros(5, 31, 32, 3)]), "decode must give float frames"),
        ("decode", lambda state: iter([torch.full((5, 32, 32, 3), torch.nan)]), "no numbers"),
        ("decode", lambda state: iter([torch.zeros(4, 32, 32, 3)]), "decode ended after 4 of 5 frames"),
        ("decode", lambda state: iter([torch.zeros(6, 32, 32, 3)]), "6 frames were decoded, 5 were asked for"),
        ("advance", lambda state, prediction: exit(1), "SystemExit"),
    ],
)
def test_a_mistake_of_the_family_fails_the_request_and_not_the_engine(loop, monkeypatch, method, wrong, message):
    with monkeypatch.context() as patch:
        patch.setattr(loop.runner.model, method, wrong)
        bad = loop.add("a dog", 2)
        loop.run()
    report = loop.last(bad)
    assert report.finish_reason == FinishReason.ERROR and message in report.kv_transfer_params["error"]
    good = loop.add("a cat", 1)
    loop.run()
    np.testing.assert_array_equal(loop.frames(good), toy_video("a cat", 1))
    assert loop.results.pending() == []


@pytest.fixture
def ahead(loop):
    loop.runner.run_ahead = True
    return loop


@pytest.mark.parametrize("where", ["start", "predict", "advance", "decode"])
def test_running_ahead_every_request_ends_once_with_what_it_gives_alone(ahead, where):
    """Steps are enqueued for requests that have ended meanwhile, of whichever kind their end was."""
    good = [ahead.add(f"p{i}", i, num_inference_steps=3 + i, num_frames=1 + 4 * i) for i in range(3)]
    bad = ahead.add("a dog", 2, fail_in=where, fail_at=1 if where in ("predict", "advance") else 0)
    foreign = "foreign"
    ahead.add_raw(foreign, None)
    late = ahead.add("late", 9, frame_type="uint8")
    ahead.run_ahead()
    for i, request_id in enumerate(good):
        expected = toy_video(f"p{i}", i, steps=3 + i, frames=1 + 4 * i)
        np.testing.assert_array_equal(ahead.frames(request_id), expected)
    np.testing.assert_array_equal(ahead.frames(late), np.rint(toy_video("late", 9) * 255).astype(np.uint8))
    assert {ahead.last(i).finish_reason for i in (bad, foreign)} == {FinishReason.ERROR}
    assert f"asked to fail in {where}" in ahead.last(bad).kv_transfer_params["error"]
    for outputs in ahead.outputs.values():
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert ahead.results.pending() == [] and not ahead.runner.running


def test_running_ahead_a_failing_delivery_is_reported_once(ahead, monkeypatch):
    """The frames are found to be no numbers when the next chunk is being decoded already."""
    chunks = [torch.full((1, 32, 32, 3), torch.nan), *[torch.zeros(1, 32, 32, 3)] * 4]
    monkeypatch.setattr(ahead.runner.model, "decode", lambda state: iter(chunks))
    request_id = ahead.add("a cat", 1)
    ahead.run_ahead()
    assert "no numbers" in ahead.last(request_id).kv_transfer_params["error"]
    assert sum(output.finish_reason is not None for output in ahead.outputs[request_id]) == 1
    assert ahead.results.pending() == [] and not ahead.runner.running


@pytest.mark.parametrize("after", range(1, 7))
def test_running_ahead_an_abort_is_seen_within_two_steps_and_leaves_nothing(ahead, after):
    drop = ahead.add("a dog", 2, num_inference_steps=3, num_frames=5)
    keep = ahead.add("a cat", 1, num_inference_steps=20)
    left = iter(range(after))
    aborted_at = []

    def between(queue):
        if not aborted_at and next(left, None) is None:
            ahead.scheduler.finish_requests([drop], RequestStatus.FINISHED_ABORTED)
            aborted_at.append(ahead.runner.stats.steps)
        elif aborted_at and ahead.runner.stats.steps - aborted_at[0] >= 1:
            assert drop not in ahead.runner.running, "the next step that is enqueued drops it"

    ahead.run_ahead(between)
    np.testing.assert_array_equal(ahead.frames(keep), toy_video("a cat", 1, steps=20))
    assert all(output.finish_reason is None for output in ahead.outputs.get(drop, []))
    assert ahead.results.pending() == [] and set(ahead.runner.running) == set()
