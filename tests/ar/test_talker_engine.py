"""The autoregressive runtime through the engine: draws, batches, preemption, text in pieces, ends of all kinds."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from omni_core.ar.messages import TalkerJob, TokenSampling
from omni_core.ar.sampling import CodeSampling
from omni_core.errors import GenerationCancelled, RequestError

pytestmark = pytest.mark.serve

GOLDEN = Path(__file__).parents[2] / "plugins" / "models" / "qwen3-tts" / "tests" / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
LENGTH = 40
DRAWS = 800
TEXT = "The rain in Spain stays mainly in the plain."


@pytest.fixture(scope="module")
def talker(talker_checkpoint):
    from talker_support import RunningTalker

    talker = RunningTalker(
        talker_checkpoint, max_num_seqs=32, max_num_batched_tokens=1024, worker_extension_cls="row_counter.RowCounter"
    )
    yield talker
    talker.close()


@pytest.fixture(scope="module")
def tight(talker_checkpoint):
    """A talker with a short context, and a cache for about one request and a half."""
    from talker_support import RunningTalker

    talker = RunningTalker(
        talker_checkpoint, block_size=32, num_gpu_blocks_override=6, max_model_len=128, disable_log_stats=False
    )
    yield talker
    talker.close()


@pytest.fixture(scope="module")
def make(talker_checkpoint):
    """Jobs of the checkpoint: ``make(seed)``, with changes to a job whose text goes with its frames."""
    from omni_plugin_qwen3_tts.config import Qwen3TTSConfig
    from omni_plugin_qwen3_tts.prompt import build_prompt
    from omni_plugin_qwen3_tts.text import TextTokenizer

    config = Qwen3TTSConfig(**json.loads((talker_checkpoint / "config.json").read_text()))
    prompt = build_prompt(config, TextTokenizer(talker_checkpoint).text(TEXT), speaker="ryan", whole_text=False)
    assert len(prompt.text) > 30
    lengths = {"max_frames": LENGTH, "min_frames": LENGTH}

    def make(seed, **changes):
        values = {"prompt": prompt.rows, "prompt_length": prompt.length, "text": prompt.text, "seed": seed, **lengths}
        return TalkerJob(**{**values, **changes})

    return make


@pytest.fixture(scope="module")
def alone(talker, make):
    """The codes of four seeds, each drawn alone."""
    return [talker.run(talker.speak(make(seed)))[0] for seed in range(4)]


def golden(name, **changes):
    """A golden request as a job, and its tensors."""
    from safetensors.torch import load_file
    from talker_support import golden_prompt, greedy_job

    from omni_plugin_qwen3_tts.checkpoints import model_config
    from omni_plugin_qwen3_tts.config import Qwen3TTSConfig

    tensors = load_file(GOLDEN / f"{name}.safetensors")
    prompt = golden_prompt(Qwen3TTSConfig(**model_config(CASES[name]["kind"])), CASES[name], tensors)
    return greedy_job(prompt, **changes), tensors


ENDING = "voice_design_text_while_decoding"
"""A request that ends by itself, after 13 frames. Checkpoints of all kinds have the same talker here."""


def same(found, expected):
    for (codes, reason), one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(codes, one)
        assert reason == "length"


# The same draws, however a request runs


def test_seeds_differ_and_repeat(talker, make, alone):
    assert all(codes.shape == (LENGTH, 16) for codes in alone)
    for index, one in enumerate(alone):
        assert len(np.unique(one[:, 5])) > 5, "it says the same all the time"
        for other in alone[:index]:
            assert (one == other).mean() < 0.2
    same([talker.run(talker.speak(make(2)))], [alone[2]])


def test_a_batch_draws_what_each_draws_alone(talker, make, alone):
    same(talker.speak_all([make(seed) for seed in range(4)]), alone)


def test_requests_that_join_and_leave_change_nothing(talker, make, alone):
    async def later(seed, seconds):
        await asyncio.sleep(seconds)
        return await talker.speak(make(seed))

    async def work():
        short = [talker.speak(make(90 + n, max_frames=3 + 5 * n, min_frames=0)) for n in range(5)]
        found = await asyncio.gather(*(later(seed, 0.4 * seed) for seed in range(4)), *short)
        return found[:4]

    same(talker.run(work()), alone)


@pytest.mark.parametrize("sizes", [(1,), (4, 1, 2), (100,)], ids=str)
def test_text_in_pieces_draws_the_same(talker, make, alone, sizes):
    async def one(seed):
        job, pieces = make(seed), []
        rest = list(job.text)
        while rest:
            size = sizes[len(pieces) % len(sizes)]
            pieces.append(rest[:size])
            rest = rest[size:]
        return await talker.speak(replace(job, text=()), pieces)

    async def work():
        return await asyncio.gather(*(one(seed) for seed in range(4)))

    same(talker.run(work()), alone)


def preemptions():
    """How often requests were preempted, as vLLM counts for Prometheus."""
    from prometheus_client import REGISTRY

    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


def test_preempted_requests_draw_the_same(tight, make, alone):
    before = preemptions()
    same(tight.speak_all([make(seed) for seed in range(4)]), alone)
    assert preemptions() > before, "the cache was large enough: nothing was preempted"


def test_preempted_requests_with_text_in_pieces_draw_the_same(tight, make, alone):
    async def one(seed):
        job = make(seed)
        pieces = [job.text[begin : begin + 10] for begin in range(0, len(job.text), 10)]
        return await tight.speak(replace(job, text=()), pieces)

    async def work():
        return await asyncio.gather(*(one(seed) for seed in range(4)))

    before = preemptions()
    same(tight.run(work()), alone)
    assert preemptions() > before, "the cache was large enough: nothing was preempted"


# The distribution


def surprise(counts, probabilities):
    """Standard deviations of chi-square above its mean; cells that expect fewer than 8 are joined."""
    expected = probabilities / probabilities.sum() * counts.sum()
    large = expected >= 8
    cells = [*zip(counts[large], expected[large], strict=True), (counts[~large].sum(), expected[~large].sum())]
    cells = [cell for cell in cells if cell[1] >= 4]
    freedom = len(cells) - 1
    assert freedom > 5
    return (sum((observed - mean) ** 2 / mean for observed, mean in cells) - freedom) / (2 * freedom) ** 0.5


def first_frames(talker, **changes):
    """The first frame of many requests with seeds of their own."""
    job, tensors = golden("custom_voice", max_frames=1, **changes)
    spoken = talker.speak_all([replace(job, seed=7919 * seed) for seed in range(DRAWS)])
    return np.stack([codes[0] for codes, _ in spoken]), tensors


def test_first_codes_have_the_reference_s_distribution(talker):
    frames, tensors = first_frames(talker, tokens=TokenSampling())
    probabilities = tensors["scores_sampled"][0].softmax(dim=-1).numpy()
    counts = np.bincount(frames[:, 0], minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    assert surprise(counts, probabilities) < 5


def test_codes_behind_them_have_it_too(talker):
    import torch

    frames, tensors = first_frames(talker, codes=CodeSampling())
    assert (frames[:, 0] == tensors["codes"][0, 0].item()).all(), "the first code is greedy here"
    logits = tensors["predictor_logits"][0] / 0.9
    logits[logits < torch.topk(logits, 50).values[-1]] = -torch.inf
    probabilities = logits.softmax(dim=-1).numpy()
    counts = np.bincount(frames[:, 1], minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    assert surprise(counts, probabilities) < 5


def test_any_number_of_candidates_will_do(talker, make):
    jobs = [
        make(1, max_frames=3, min_frames=0, tokens=TokenSampling(top_k=k), codes=CodeSampling(top_k=k))
        for k in (0, 1, 10**5)
    ]
    everything, one, many = (codes for codes, _ in talker.speak_all(jobs))
    np.testing.assert_array_equal(everything, many)
    assert one.tolist() != many.tolist()


# Ends


@pytest.mark.parametrize(
    ("limits", "frames", "reason"),
    [
        ({"max_frames": 24}, 13, "stop"),
        ({"max_frames": 14}, 13, "stop"),
        ({"max_frames": 13}, 13, "length"),
        ({"max_frames": 1}, 1, "length"),
        ({"max_frames": 2, "min_frames": 9}, 2, "length"),
        ({"max_frames": 18, "min_frames": 18}, 18, "length"),
    ],
)
@pytest.mark.parametrize("size", [None, 3, 13, 14])
def test_requests_end_where_they_should(talker, limits, frames, reason, size):
    job, tensors = golden(ENDING, **limits)
    pieces = None if size is None else [job.text[begin : begin + size] for begin in range(0, len(job.text), size)]
    codes, why = talker.run(talker.speak(job if size is None else replace(job, text=()), pieces))
    assert (len(codes), why) == (frames, reason)
    known = min(frames, 13)
    np.testing.assert_array_equal(codes[:known], tensors["codes"][:known])


def test_the_context_ends_a_request(tight, make):
    job = make(1, max_frames=10_000, min_frames=10_000)
    room = 128 - job.prompt_length
    codes, reason = tight.run(tight.speak(job))
    assert (len(codes), reason) == (room, "length")
    pieced, reason = tight.run(tight.speak(replace(job, text=()), [job.text[:20], job.text[20:]]))
    assert reason == "length"
    np.testing.assert_array_equal(pieced, codes)


def test_a_prompt_beyond_the_context_is_refused(talker, make, alone):
    for text in (None, [[1]]):
        with pytest.raises(RequestError, match=r"512 rows, and stage 'talker' holds 512") as refusal:
            talker.run(talker.speak(make(1, prompt_length=512), text))
        assert refusal.value.param == "input"
    same([talker.run(talker.speak(make(1)))], [alone[1]])


def test_the_repetition_penalty_is_the_request_s_own(talker, make):
    """A penalty beyond what any logit can stand lets no first code come twice."""
    strong = TokenSampling(temperature=0.0, repetition_penalty=1000.0)
    weak = TokenSampling(temperature=0.0, repetition_penalty=1.0)
    jobs = [make(1, tokens=tokens, codes=CodeSampling(temperature=0.0)) for tokens in (strong, weak)]
    (apart, _), (free, _) = talker.speak_all(jobs)
    assert len(set(apart[:, 0].tolist())) == LENGTH > len(set(free[:, 0].tolist()))


# What goes wrong


def test_text_that_fails_fails_its_request_alone(talker, make, alone):
    async def failing():
        yield make(1).text[:3]
        raise OSError("the line is dead")

    async def broken():
        async for _ in talker.engine.generate(replace(make(1), text=()), "broken", failing()):
            pass

    async def odd():
        async for _ in talker.engine.generate(replace(make(1), text=()), "odd", numbers()):
            pass

    async def numbers():
        yield np.arange(3)

    async def work():
        return await asyncio.gather(broken(), odd(), talker.speak(make(1)), return_exceptions=True)

    first, second, spoken = talker.run(work())
    assert isinstance(first, OSError) and str(first) == "the line is dead"
    assert isinstance(second, ValueError) and "text ids must be integers" in str(second)
    same([spoken], [alone[1]])


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_request_that_the_engine_aborts_is_cancelled(talker, make, alone, in_pieces):
    async def text():
        yield make(1).text[:30]
        await asyncio.sleep(60)

    async def aborted():
        job = replace(make(1, max_frames=400, min_frames=400), text=())
        async for _ in talker.engine.generate(job, "aborted", text() if in_pieces else None):
            await talker.engine.client.abort("aborted")

    async def work():
        return await asyncio.gather(aborted(), talker.speak(make(2)), return_exceptions=True)

    error, spoken = talker.run(work())
    assert isinstance(error, GenerationCancelled) and "request aborted" in str(error)
    same([spoken], [alone[2]])


def test_requests_that_are_not_omni_s_end_nothing(talker, make, alone):
    from vllm import SamplingParams

    async def plain(number):
        parameters = SamplingParams(
            max_tokens=20, temperature=0.5, seed=number, ignore_eos=True, repetition_penalty=1.1
        )
        async for output in talker.engine.client.generate({"prompt_token_ids": [1, 2, 3]}, parameters, f"p{number}"):
            last = output
        return len(last.outputs[0].token_ids)

    async def work():
        return await asyncio.gather(talker.speak(make(3)), *(plain(number) for number in range(3)))

    spoken, *plain_lengths = talker.run(work())
    same([spoken], [alone[3]])
    assert all(plain_lengths)


def test_vllm_s_warm_up_runs(talker, make, alone):
    talker.run(talker.engine.client.collective_rpc("warm_up"))
    same([talker.run(talker.speak(make(3)))], [alone[3]])


def test_two_hundred_requests_cancelled_at_random_leave_the_rest_right_and_nothing_behind(talker, make):
    choose = random.Random(0)
    jobs = [make(seed, max_frames=4 + 2 * seed, min_frames=4 + 2 * seed) for seed in range(6)]
    expected = [talker.run(talker.speak(job))[0] for job in jobs]
    outcomes = {"done": 0, "cancelled": 0}
    places = asyncio.Semaphore(24)

    async def one(number):
        job, pieces = jobs[number % 6], None
        if choose.random() < 0.4:
            pieces = [job.text[begin : begin + 3] for begin in range(0, len(job.text), 3)]
        work = asyncio.ensure_future(talker.speak(job if pieces is None else replace(job, text=()), pieces))
        patience = choose.choice([None, None, 0.0, 0.01, 0.2, 0.5, 1.0])
        async with places:
            done, _ = await asyncio.wait([work], timeout=patience)
            if done:
                same([work.result()], [expected[number % 6]])
                outcomes["done"] += 1
            else:
                work.cancel()
                outcomes["cancelled"] += 1
                await asyncio.wait([work])

    async def wave(count):
        await asyncio.gather(*(one(number) for number in range(count)))
        await talker.speak(jobs[0])  # tells the worker of the last that ended

    async def rows():
        ((total, held),) = await talker.engine.client.collective_rpc("count_rows")
        return total, held

    talker.run(wave(60))
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    memory = [p.memory_info().rss for p in processes]
    talker.run(wave(200))
    _, held = talker.run(rows())
    assert held <= 1
    assert min(outcomes.values()) > 20, outcomes
    assert not talker.engine.client.output_processor.has_unfinished_requests()
    assert len(talker.engine._ended) <= 1
    for process, before in zip(processes, memory, strict=True):
        assert process.memory_info().rss < before + 32 * 2**20, process.name()


def test_five_hundred_requests_of_a_few_clients_need_no_more_rows_than_the_first_hundred(talker, make):
    """Rows are never taken away: were one lost with a request, or with one that was cancelled, they would grow.

    Requests that come all at once take a row each, since those that have ended are told with later ones.
    """
    choose = random.Random(1)
    job = make(1, max_frames=3, min_frames=3)

    async def client(count):
        for _ in range(count):
            work = asyncio.ensure_future(talker.speak(job))
            if (patience := choose.choice([None, None, 0.0, 0.01, 0.05])) is not None:
                await asyncio.wait([work], timeout=patience)
                work.cancel()
            await asyncio.wait([work])

    async def wave(count):
        await asyncio.gather(*(client(count // 25) for _ in range(25)))
        ((total, _),) = await talker.engine.client.collective_rpc("count_rows")
        return total

    first = talker.run(wave(100))
    assert talker.run(wave(400)) == first
