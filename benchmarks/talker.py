#!/usr/bin/env python3
"""Frames of a talker without decoder and HTTP: the code predictor by itself, and the engine around everything.

    python -m omni_plugin_qwen3_tts.checkpoints CKPT --size 1.7b --device cuda --endless
    python benchmarks/talker.py CKPT --streams 1 8 64
    python benchmarks/talker.py --predictor 1 8 32 64

With ``--predictor``, milliseconds of a frame's fifteen predicted codes at Qwen3-TTS's genuine size, recorded and
replayed: PyTorch's kernels, ours, and ours with launches that overlap; and how far the logits of the last differ from
the first's. Otherwise the talker's stage of CKPT is started, and for each number of streams, which begin together, come
milliseconds between frames, milliseconds to the first, and seconds of audio in a second (a frame is 80 ms), once for
each round. The checkpoint has to be endless, or streams end early.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

FRAME_SECONDS = 0.08
SIZE = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "num_hidden_layers": 5, "num_code_groups": 16, "vocab_size": 2048,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e6},
}  # fmt: skip
TALKER_HIDDEN, FIRST_CODES = 2048, 3072


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--frames", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--predictor", nargs="*", type=int, help="requests; the predictor alone, without a checkpoint")
    arguments = parser.parse_args()
    from omni_core.config.startup import check_versions

    check_versions(allow_version_mismatch=False)  # before vLLM is imported
    if arguments.predictor is not None:
        predictor(arguments.predictor)
    elif arguments.checkpoint is None:
        parser.error("give a checkpoint, or --predictor")
    else:
        engine(arguments)


def predictor(sizes: list[int]) -> None:
    """Print a row for each number of requests."""
    import torch
    from omni_plugin_qwen3_tts.code_predictor import CodePredictorModel
    from omni_plugin_qwen3_tts.fused_predictor import FusedCodePredictor

    from omni_core.ar.sampling import sample_codes
    from omni_platform_cuda.sampling import sample_codes_kernel

    device = torch.device("cuda")
    with torch.inference_mode(), torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        model = CodePredictorModel(SimpleNamespace(**SIZE), TALKER_HIDDEN).to(device, torch.bfloat16)
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
        table = torch.randn(FIRST_CODES, TALKER_HIDDEN, device=device).bfloat16()
        print("| requests | PyTorch | fused | fused, overlapping | logits differ, of |\n|" + " ---: |" * 5)
        for count in sizes:
            hidden, first = torch.randn(count, TALKER_HIDDEN, device=device).bfloat16(), torch.arange(count).to(device)
            row = torch.arange(count, device=device)
            settings = torch.full((count,), 0.9, device=device), torch.full_like(row, 50), torch.ones_like(row) * 1.0
            logits: list[list[torch.Tensor]] = []

            def chooser(
                sample: Callable[..., Any], forced: bool, logits: Any = logits, settings: Any = settings, row: Any = row
            ) -> Any:
                seen: list[torch.Tensor] = []
                logits.append(seen)

                def choose(scores: torch.Tensor, group: int, rows: torch.Tensor) -> Any:
                    if forced:
                        seen.append(scores.float())
                        codes = (row * 13 + group * 7) % SIZE["vocab_size"]
                        return codes, rows[codes]
                    drawn = sample(scores, *settings, row, row * 16 + group)
                    return drawn if isinstance(drawn, tuple) else (drawn, rows[drawn])

                return choose

            fused = [FusedCodePredictor(model, table, pdl=pdl) for pdl in (False, True)]
            forms: list[Callable[[Any], object]] = [
                lambda choose, h=hidden, f=first: model(h, f, table[f], choose),
                *(partial(form, hidden, first) for form in fused),
            ]
            samples = [sample_codes, sample_codes_kernel, sample_codes_kernel]
            times = [
                _replayed(partial(form, chooser(sample, False))) for form, sample in zip(forms, samples, strict=True)
            ]
            logits.clear()
            forms[0](chooser(sample_codes, True))
            forms[2](chooser(sample_codes, True))
            plain, ours = (torch.stack(seen) for seen in logits)
            differ, most = (plain - ours).abs().max(), plain.abs().max()
            print(
                f"| {count} | " + " | ".join(f"{t:.3f}" for t in times) + f" | {differ:.3f}, {most:.2f} |", flush=True
            )


def _replayed(work: Callable[[], object], times: int = 20) -> float:
    """Milliseconds of ``work`` in a CUDA graph."""
    import torch

    from omni_platform_cuda.graphs import capture

    replay, _ = capture(work)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    begin.record()
    for _ in range(times):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def engine(arguments: argparse.Namespace) -> None:
    """Print a row for each number of streams and round."""
    from omni_core.vllm.ar.engine import TalkerEngine
    from omni_core.vllm.arguments import resolve_for_api
    from omni_plugin_qwen3_tts.family import speech
    from omni_plugin_qwen3_tts.requests import Qwen3TTSRequest

    resolved = resolve_for_api(
        arguments.checkpoint,
        deploy=None,
        overrides={},
        allow_version_mismatch=False,
        engine={"disable_log_stats": True},
    )
    model = speech(resolved.checkpoint)
    loop = asyncio.new_event_loop()
    begin = time.perf_counter()

    async def start() -> TalkerEngine:
        return TalkerEngine(resolved, resolved.stage, model)

    talker = loop.run_until_complete(start())
    print(f"started after {time.perf_counter() - begin:.1f} s")

    async def one(seed: int, first: list[float]) -> int:
        text = "one two three four five. six seven eight."
        request = Qwen3TTSRequest(input=text, language="English", max_new_tokens=arguments.frames, seed=seed)
        began, made = time.perf_counter(), 0
        async for frames in talker.generate(model.utterance(request, None).job, uuid.uuid4().hex):
            if not made:
                first.append(time.perf_counter() - began)
            made += len(frames.codes)
        return made

    async def streams(count: int) -> tuple[float, list[int], float]:
        first: list[float] = []
        began = time.perf_counter()
        made = await asyncio.gather(*(one(seed, first) for seed in range(count)))
        return time.perf_counter() - began, made, sorted(first)[len(first) // 2]

    print("| streams | frames | ms a frame | ms to the first, median | audio s / s |\n|" + " ---: |" * 5)
    for count in arguments.streams:
        loop.run_until_complete(streams(count))
        for _ in range(arguments.rounds):
            seconds, made, first = loop.run_until_complete(streams(count))
            pace = (seconds - first) / max(1, max(made) - 1)
            audio = sum(made) * FRAME_SECONDS / seconds
            print(
                f"| {count} | {min(made)}-{max(made)} | {pace * 1e3:.3f} | {first * 1e3:.1f} | {audio:.1f} |",
                flush=True,
            )
    talker.close()


if __name__ == "__main__":
    main()
