"""Model Runner V2 on CPU beside vLLM's own CPU runner: the same tokens, and draws that are what they should be.

Two processes run the same engines: a plain vLLM one, and one of Omni's. Everything below reads what they answered.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cpu_tiny import VOCABULARY, write_qwen3, write_qwen3_vl, write_sliding

from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, PluginManager

pytestmark = pytest.mark.serve

HERE = Path(__file__).parent
LENGTHS = [(5, 20), (150, 10), (70, 30), (1, 25), (64, 8), (33, 40), (128, 12), (9, 30), (100, 20), (2, 50)]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
DRAWS = 1500


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **more}


def requests(seed: int, lengths: list[tuple[int, int]], **more: Any) -> list[dict[str, Any]]:
    """Random prompts; more requests than run at once, most of them longer than a step's tokens."""
    draw = random.Random(seed)
    return [
        {"prompt": [draw.randrange(3, VOCABULARY) for _ in range(length)], "params": greedy(tokens, **more)}
        for length, tokens in lengths
    ]


def with_params(batch: list[dict[str, Any]], *variants: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests with the variants' parameters in turn."""
    pairs = zip(batch, variants * len(batch), strict=False)
    return [{**request, "params": {**request["params"], **variant}} for request, variant in pairs]


def qwen3_batches() -> dict[str, Any]:
    some = requests(1, LENGTHS[:6])
    draw = random.Random(2)
    return {
        "greedy": requests(0, LENGTHS),
        "logprobs": with_params(some, {"logprobs": 3, "prompt_logprobs": 2}, {}, {"logprobs": 0}),
        "named logprobs": with_params(some, {"logprob_token_ids": [7, 70, 700]}),
        "penalties": with_params(
            some,
            {"repetition_penalty": 1.5},
            {"frequency_penalty": 0.7, "presence_penalty": -0.4},
            {"repetition_penalty": 0.8, "presence_penalty": 1.0},
        ),
        "biased": with_params(
            some,
            {"logit_bias": {str(token): 4.0 for token in range(50, 90)}},
            {"allowed_token_ids": list(range(100, 140))},
            {"ignore_eos": False, "stop_token_ids": list(range(3, 1000, 10)), "min_tokens": 12},
        ),
        "sessions": [
            {
                "chunks": [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths],
                "params": {**greedy(6), "output_kind": 1},
            }
            for lengths in ([5, 3, 1], [80, 1, 1, 20], [1, 1])
        ],
    }


def vision_batches() -> dict[str, Any]:
    texts = [
        {"text": f"look {IMAGE} here", "image": [64, 96, 0]},
        {"text": "no image at all, only bytes that are not few"},
        {"text": f"{IMAGE}and", "image": [128, 64, 1]},
    ]
    batch = [{**text, "params": greedy(20)} for text in texts]
    return {
        "greedy": batch,
        "bad words": with_params(batch, {"bad_words": ["a", "bc", "e", "\u0001"]}),
        "grammar": with_params(batch, {"regex": "[a-f]{4}[0-9]+x", "ignore_eos": False}),
    }


def sampled_batches() -> dict[str, Any]:
    """For the runner of Omni's alone: vLLM's own cannot draw with seeds on CPU."""
    seeded = with_params(
        requests(5, LENGTHS[:8]),
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.7, "seed": -3, "top_p": 0.9},
        {"temperature": 1.3, "seed": 2**40, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 5, "min_p": 0.05},
    )
    prompt = [9, 8, 7, 6, 5]
    once = {"temperature": 0.8, "max_tokens": 1}
    return {
        "greedy": requests(0, LENGTHS),
        "greedy again": requests(0, LENGTHS),
        "together": seeded,
        **{f"alone {number}": [request] for number, request in enumerate(seeded)},
        "distribution": [{"prompt": prompt, "params": greedy(1, logprobs=VOCABULARY)}],
        "draws": [{"prompt": prompt, "params": {**once, "seed": seed}} for seed in range(DRAWS)],
        "unseeded": [{"prompt": prompt, "params": {**once, "n": 50}} for _ in range(DRAWS // 50)],
    }


def runs(checkpoints: dict[str, Path]) -> list[dict[str, Any]]:
    qwen3, vision = str(checkpoints["qwen3"]), str(checkpoints["vision"])
    tight = {"model": qwen3, "max_model_len": 256, "num_gpu_blocks_override": 12}
    embeds = [{"embeds": seed, "length": 20 * seed, "hidden": 64, "params": greedy(12)} for seed in range(1, 6)]
    return [
        {"name": "qwen3", "engine": {"model": qwen3}, "batches": qwen3_batches()},
        {
            "name": "bfloat16",
            "engine": {"model": qwen3, "dtype": "bfloat16"},
            "batches": {"greedy": requests(0, LENGTHS)},
        },
        {
            "name": "preempted",
            "engine": tight,
            "batches": {
                "greedy": requests(3, [(60, 100)] * 6),
                "penalties": requests(4, [(60, 100)] * 5, presence_penalty=1),
            },
        },
        {
            "name": "sliding",
            "engine": {"model": str(checkpoints["sliding"])},
            "batches": {"greedy": requests(0, LENGTHS)},
        },
        {
            "name": "embeds",
            "engine": {"model": qwen3, "enable_prompt_embeds": True},
            "batches": {"greedy": [*embeds, *requests(6, LENGTHS[:3])]},
        },
        {
            "name": "vision",
            "engine": {"model": vision, "skip_tokenizer_init": False, "mm_processor_cache_gb": 0},
            "batches": vision_batches(),
        },
    ]


def sampled(checkpoints: dict[str, Path]) -> dict[str, Any]:
    engine = {
        "model": str(checkpoints["qwen3"]),
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_logprobs": VOCABULARY,
    }
    return {"name": "sampled", "engine": engine, "batches": sampled_batches()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_qwen3(folder / "qwen3")
    write_sliding(folder / "sliding")
    write_qwen3_vl(folder / "vision")
    return {name: folder / name for name in ("qwen3", "sliding", "vision")}


@pytest.fixture(scope="module")
def answers(checkpoints, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What the two processes answered, by ``vllm`` and ``omni``."""
    folder = tmp_path_factory.mktemp("engines")
    common = runs(checkpoints)
    plain = {name: value for name, value in os.environ.items() if name != PLUGIN_SET_VARIABLE}
    omni = {**plain, PLUGIN_SET_VARIABLE: PluginManager.scan().plugin_set.to_json()}
    processes = {
        "vllm": start(folder / "vllm", common, plain),
        "omni": start(folder / "omni", [*common, sampled(checkpoints)], omni),
    }
    return {name: result(process, folder / name) for name, process in processes.items()}


def start(folder: Path, todo: list[dict[str, Any]], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "runs.json").write_text(json.dumps(todo))
    command = [sys.executable, str(HERE / "cpu_engines.py"), str(folder / "runs.json")]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def result(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    try:
        status = process.wait(570)
    finally:
        process.kill()
    log = (folder / "log").read_text(errors="replace")
    assert status == 0, log[-6000:]
    (line,) = [line for line in log.splitlines() if line.startswith("RESULTS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULTS "))
    return found


def test_only_omni_s_process_runs_on_its_platform(answers):
    assert answers["vllm"]["platform"] == "vllm.platforms.cpu.CpuPlatform"
    assert answers["omni"]["platform"] == "omni_platform_cpu.platform.OmniCpuPlatform"
    assert {run["runner"] for run in answers["vllm"]["runs"].values()} == {"V1"}
    assert {run["runner"] for run in answers["omni"]["runs"].values()} == {"V2"}


def test_asynchronous_scheduling_is_as_configured(answers):
    assert answers["omni"]["runs"]["qwen3"]["asynchronous"]
    assert not answers["omni"]["runs"]["sampled"]["asynchronous"]


COMMON = [
    *(("qwen3", batch) for batch in qwen3_batches()),
    ("bfloat16", "greedy"),
    ("preempted", "greedy"),
    ("preempted", "penalties"),
    ("sliding", "greedy"),
    ("embeds", "greedy"),
    *(("vision", batch) for batch in vision_batches()),
]


@pytest.mark.parametrize(("run", "batch"), COMMON)
def test_tokens_are_those_of_vllm_s_own_runner(answers, run, batch):
    expected, found = (answers[side]["runs"][run]["batches"][batch] for side in ("vllm", "omni"))
    assert [answer["tokens"] for answer in found] == [answer["tokens"] for answer in expected]
    assert len({token for answer in found for token in answer["tokens"][0]}) > 4, "a model that says nothing"


@pytest.mark.parametrize("batch", ["greedy", "greedy again"])
def test_without_asynchronous_scheduling_and_from_cached_prefixes_they_are_too(answers, batch):
    expected = answers["vllm"]["runs"]["qwen3"]["batches"]["greedy"]
    found = answers["omni"]["runs"]["sampled"]["batches"][batch]
    assert [answer["tokens"] for answer in found] == [answer["tokens"] for answer in expected]


def test_requests_were_preempted(answers):
    assert answers["omni"]["runs"]["preempted"]["preempted"] >= 3


@pytest.mark.parametrize("batch", ["logprobs", "named logprobs"])
def test_log_probabilities_and_ranks_are_the_same(answers, batch):
    expected, found = (answers[side]["runs"]["qwen3"]["batches"][batch] for side in ("vllm", "omni"))
    compared = 0
    for one, other in zip(expected, found, strict=True):
        for kind in ("logprobs", "prompt_logprobs"):
            assert (kind in one) == (kind in other)
            pairs = zip(flatten(one.get(kind, [])), flatten(other.get(kind, [])), strict=True)
            for (token, logprob, rank), (same_token, same_logprob, same_rank) in pairs:
                assert (token, rank) == (same_token, same_rank)
                assert logprob == pytest.approx(same_logprob, abs=2e-4)
                compared += 1
    assert compared > 100


def flatten(nested: Any) -> list[Any]:
    """The entries (token, log-probability, rank) of positions, of one or of several completions."""
    while nested and isinstance(nested[0][0], list):
        nested = [item for part in nested for item in part]
    return list(nested)


def test_bad_words_and_grammars_hold(answers):
    batches = answers["omni"]["runs"]["vision"]["batches"]
    for answer in batches["bad words"]:
        assert not any(word in answer["text"][0] for word in ("a", "bc", "e"))
    for answer in batches["grammar"]:
        letters, rest = answer["text"][0][:4], answer["text"][0][4:]
        assert set(letters) <= set("abcdef") and set(rest) <= set("0123456789x")


def test_a_seeded_request_draws_the_same_alone_and_in_a_batch(answers):
    batches = answers["omni"]["runs"]["sampled"]["batches"]
    together = [answer["tokens"] for answer in batches["together"]]
    assert together == [batches[f"alone {number}"][0]["tokens"] for number in range(len(together))]


@pytest.mark.parametrize("batch", ["draws", "unseeded"])
def test_temperature_draws_from_the_softmax(answers, batch):
    batches = answers["omni"]["runs"]["sampled"]["batches"]
    ((position,),) = (answer["logprobs"][0] for answer in batches["distribution"])
    weights = {token: math.exp(logprob / 0.8) for token, logprob, _ in position}
    total = sum(weights.values())
    counts = Counter(tokens[0] for answer in batches[batch] for tokens in answer["tokens"])
    draws = sum(counts.values())
    assert draws == DRAWS

    likely = [token for token, weight in weights.items() if draws * weight / total >= 8]
    assert len(likely) > 5
    cells = [(counts[token], draws * weights[token] / total) for token in likely]
    seen, expected = (sum(column) for column in zip(*cells, strict=True))
    if draws - expected >= 8:
        cells.append((draws - seen, draws - expected))
    statistic = sum((observed - mean) ** 2 / mean for observed, mean in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4  # far beyond the 99.9th percentile


def test_a_kernel_that_is_not_written_says_so(answers):
    error = answers["omni"]["uncovered"]
    assert error.startswith("UnsupportedOnCpu: ")
    assert "context parallelism" in error and "cp_utils._dcp_local_seq_lens_kernel" in error
