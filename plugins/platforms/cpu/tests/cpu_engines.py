"""Run by the tests in processes of their own: engines one after the other, each with its batches of requests.

``python cpu_engines.py RUNS.json`` reads a list of runs, ``{"name", "engine": {...}, "batches": {name: [request]}}``,
and prints ``RESULTS {"platform", "uncovered", "runs": {name: {"runner", "asynchronous", "preempted", "batches":
{name: [answer]}}}}``. A request has one of ``prompt`` (token ids), ``text``, ``embeds`` (a seed) or ``chunks`` (token
ids in pieces, a session), and ``params``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

DEFAULTS = {
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


def main() -> None:
    """Do every run of the file."""
    from vllm.platforms import current_platform

    runs = {run["name"]: serve(run) for run in json.loads(Path(sys.argv[1]).read_text())}
    platform = f"{type(current_platform).__module__}.{type(current_platform).__name__}"
    print("RESULTS " + json.dumps({"platform": platform, "uncovered": launch_uncovered(), "runs": runs}), flush=True)


def serve(run: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, answer its batches, stop it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**{**DEFAULTS, **run["engine"]})
    config = llm.llm_engine.vllm_config
    preempted = count_preemptions(llm)
    result = {
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "asynchronous": config.scheduler_config.async_scheduling,
        "batches": {name: answer_batch(llm, batch) for name, batch in run["batches"].items()},
        "preempted": len(preempted),
    }
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return result


def count_preemptions(llm: Any) -> list[str]:
    """A list that gets the id of every request that is preempted from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, found = scheduler._preempt_request, []

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return found


def answer_batch(llm: Any, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All requests of a batch at once."""
    if "chunks" in batch[0]:
        return [{"tokens": [tokens]} for tokens in run_sessions(llm, batch)]
    prompts, params = [prompt(request) for request in batch], [parameters(request) for request in batch]
    return [answer(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def prompt(request: dict[str, Any]) -> Any:
    """A request's prompt, as vLLM takes it."""
    if "embeds" in request:
        import torch

        generator = torch.Generator().manual_seed(request["embeds"])
        return {"prompt_embeds": torch.randn(request["length"], request["hidden"], generator=generator)}
    if "text" not in request:
        return {"prompt_token_ids": request["prompt"]}
    if "image" not in request:
        return {"prompt": request["text"]}
    import numpy as np
    from PIL import Image

    *size, seed = request["image"]
    pixels = np.random.RandomState(seed).randint(0, 255, (*size, 3), dtype=np.uint8)
    return {"prompt": request["text"], "multi_modal_data": {"image": Image.fromarray(pixels)}}


def parameters(request: dict[str, Any]) -> Any:
    """A request's sampling parameters; JSON has no integers as keys, and no classes."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields = dict(request["params"])
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if "regex" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(regex=fields.pop("regex"))
    return SamplingParams(**fields)


def run_sessions(llm: Any, batch: list[dict[str, Any]]) -> list[list[int]]:
    """Streaming input: each request's chunks, one by one, the next as soon as the engine is done with the last."""
    engine = llm.llm_engine
    waiting = {f"session-{number}": [request, *request["chunks"]] for number, request in enumerate(batch)}
    tokens: dict[str, list[int]] = {name: [] for name in waiting}

    def add(name: str) -> None:
        request, chunk = waiting[name][0], waiting[name].pop(1)
        prompt = {"prompt_token_ids": list(chunk)}
        added = engine.input_processor.process_inputs(name, prompt, parameters(request), ("generate",), resumable=True)
        added.external_req_id = name
        engine.engine_core.add_request(added)

    for name in tokens:
        add(name)
    while waiting:
        for output in engine.engine_core.get_output().outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is None:
                continue
            if len(waiting[output.request_id]) > 1:
                add(output.request_id)
            else:
                del waiting[output.request_id]
                engine.engine_core.abort_requests([output.request_id])
    return list(tokens.values())


def answer(output: Any) -> dict[str, Any]:
    """What a request gave, as JSON."""
    found: dict[str, Any] = {"tokens": [list(completion.token_ids) for completion in output.outputs]}
    found["text"] = [completion.text for completion in output.outputs]
    if output.outputs[0].logprobs:
        found["logprobs"] = [positions(completion.logprobs) for completion in output.outputs]
    if output.prompt_logprobs:
        found["prompt_logprobs"] = positions(output.prompt_logprobs[1:])
    return found


def positions(logprobs: Any) -> list[list[tuple[int, float, int]]]:
    """Token, log-probability and rank, of each position."""
    return [[(token, entry.logprob, entry.rank) for token, entry in position.items()] for position in logprobs]


def launch_uncovered() -> str:
    """The error of launching a kernel that nobody replaces; nothing where there is no Triton."""
    import torch
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return ""
    from vllm.v1.worker.gpu.cp_utils import _dcp_local_seq_lens_kernel

    one = torch.ones(1, dtype=torch.int32)
    try:
        _dcp_local_seq_lens_kernel[(1,)](one, one, 2, 0, 1, 1, 1, BLOCK_SIZE=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "launched"


if __name__ == "__main__":
    main()
