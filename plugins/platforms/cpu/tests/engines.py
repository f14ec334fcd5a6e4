"""Run by the tests in processes of their own: engines one after the other, each with its requests.

``python engines.py RUNS.json``: reads a list of ``{"name", "engine": {...}, "batches": {batch: [{"prompt", "params"}]}}``,
prints one line ``RESULTS {run: {"runner": "V2", "batches": {batch: [{"tokens", ...}]}}}``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    """Do every run of the file."""
    results = {run["name"]: serve(run) for run in json.loads(Path(sys.argv[1]).read_text())}
    print("RESULTS " + json.dumps(results), flush=True)


def serve(run: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, answer its batches, stop it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
    }
    llm = LLM(**{**defaults, **run["engine"]})
    config = llm.llm_engine.vllm_config
    answers = {name: [answer(output) for output in generate(llm, batch)] for name, batch in run["batches"].items()}
    preempted = llm.llm_engine.engine_core.engine_core.scheduler.num_preempted if False else None
    result = {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async": config.scheduler_config.async_scheduling,
        "batches": answers,
        "preempted": preempted,
    }
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return result


def generate(llm: Any, batch: list[dict[str, Any]]) -> list[Any]:
    """All requests of a batch at once."""
    from vllm import SamplingParams

    prompts = [prompt(request) for request in batch]
    outputs: list[Any] = llm.generate(prompts, [SamplingParams(**r["params"]) for r in batch], use_tqdm=False)
    return outputs


def prompt(request: dict[str, Any]) -> Any:
    """Token ids, or embeddings drawn from a seed: ``{"embeds": seed, "length", "hidden"}``."""
    if "embeds" not in request:
        return {"prompt_token_ids": request["prompt"]}
    import torch

    generator = torch.Generator().manual_seed(request["embeds"])
    return {"prompt_embeds": 0.2 * torch.randn(request["length"], request["hidden"], generator=generator)}


def answer(output: Any) -> dict[str, Any]:
    """What a request gave, as JSON."""
    found: dict[str, Any] = {"tokens": [list(completion.token_ids) for completion in output.outputs]}
    if output.outputs[0].logprobs:
        found["logprobs"] = [positions(completion.logprobs) for completion in output.outputs]
    if output.prompt_logprobs:
        found["prompt_logprobs"] = positions(output.prompt_logprobs[1:])
    return found


def positions(logprobs: Any) -> list[list[tuple[int, float, int]]]:
    """Token, log-probability and rank, of each position."""
    return [[(token, entry.logprob, entry.rank) for token, entry in position.items()] for position in logprobs]


if __name__ == "__main__":
    main()
