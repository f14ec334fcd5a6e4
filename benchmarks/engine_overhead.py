#!/usr/bin/env python3
"""What the engine adds to a denoising step: an engine beside a bare loop over the same model, in the same run.

    python benchmarks/engine_overhead.py --rounds 7 --record

For each model and executor, rounds alternate between the bare loop (the model's contract called in this process) and
the engine (requests through ``VideoEngine``, as HTTP sends them), without and with run-ahead
(``--async-scheduling``): an engine each, of which one works at a time. The figure of a round is the time between two
denoising steps while all of its requests are denoising; of rounds the median is given.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import (
    BUILT_IN,
    bare_step,
    checkpoints,
    finish,
    load_bare,
    median,
    request_fields,
    start_bare,
    synchronize,
    table,
)

ATTEMPTS = 5


@dataclass
class Case:
    """Rounds of one model, executor, setting of run-ahead and number of requests; milliseconds a step.

    ``model``: what the worker itself measures of a step: the model's part.
    """

    name: str
    executor: str
    ahead: bool
    requests: int
    bare: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    model: list[float] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """Medians, for the table."""
        bare, engine, model = median(self.bare), median(self.engine), median(self.model)
        figures = (f"{bare:.2f}", f"{engine:.2f}", f"{engine - bare:+.2f}", f"{engine / bare:.2f}")
        ahead = "yes" if self.ahead else "no"
        return (self.name, self.executor, ahead, str(self.requests), *figures, f"{engine - model:+.2f}")


HEADER = (
    "model", "executor", "run-ahead", "requests", "bare (ms)", "engine (ms)", "engine - bare (ms)", "engine / bare",
    "engine - worker's own model time (ms)",
)  # fmt: skip


def bare_round(model: Any, requests: Sequence[Any]) -> float:
    """Milliseconds a step of the bare loop."""
    states = start_bare(model, requests)
    bare_step(model, states)  # both sides leave the first step out
    synchronize()
    begin = time.perf_counter()
    steps: int = states[0].num_steps - 1
    for _ in range(steps):
        bare_step(model, states)
    synchronize()
    return 1000 * (time.perf_counter() - begin) / steps


async def engine_round(engine: Any, requests: Sequence[Any]) -> tuple[float, float]:
    """Milliseconds a step of the engine, and of that what its worker says the model took.

    Reports coalesce while this process is kept from reading them; a round of which nothing is seen is run again.
    """
    for _ in range(ATTEMPTS):
        if (figures := await try_round(engine, requests)) is not None:
            return figures
    raise SystemExit("the requests were not seen to denoise together; give more --steps")


async def try_round(engine: Any, requests: Sequence[Any]) -> tuple[float, float] | None:
    """The figures of ``engine_round``, or ``None`` where too little was seen."""
    seen: list[list[tuple[float, int]]] = [[] for _ in requests]

    def note(index: int, progress: Any) -> None:
        if progress.step and progress.phase == "denoise":
            seen[index].append((time.perf_counter(), progress.step))

    work = [
        engine.generate(request, progress=lambda progress, index=index: note(index, progress))
        for index, request in enumerate(requests)
    ]
    outputs = await asyncio.gather(*work)
    if not all(seen):
        return None
    begin, end = max(steps[0][0] for steps in seen), min(steps[-1][0] for steps in seen)
    together = [[event for event in steps if begin <= event[0] <= end] for steps in seen]
    figures = [1000 * (s[-1][0] - s[0][0]) / (s[-1][1] - s[0][1]) for s in together if len(s) > 1]
    if not figures:
        return None
    model = [1000 * o.seconds["denoise"] / o.request.num_inference_steps for o in outputs]
    return median(figures), median(model)


async def measure(folder: Path, executor: str, arguments: argparse.Namespace) -> list[Case]:
    """The rounds of one model and executor, for each setting of run-ahead and number of requests."""
    from omni_core.api import AsyncOmni
    from omni_core.vllm.parallel import parallel_state

    most = max(arguments.requests)
    settings = [setting == "yes" for setting in arguments.run_ahead]
    cases = [Case(folder.name, executor, ahead, number) for number in arguments.requests for ahead in settings]
    async with AsyncExitStack() as stack:
        engines = {
            ahead: await stack.enter_async_context(
                AsyncOmni(
                    folder, distributed_executor_backend=executor, max_num_seqs=most, async_scheduling=ahead,
                    gpu_memory_utilization=arguments.gpu_memory_utilization,
                )
            )
            for ahead in settings
        }  # fmt: skip
        with parallel_state():  # which a worker has before it loads a model
            model = load_bare(next(iter(engines.values())).resolved)
            await alternate({ahead: omni.engine for ahead, omni in engines.items()}, model, cases, arguments)
    return cases


async def alternate(engines: Any, model: Any, cases: Sequence[Case], arguments: argparse.Namespace) -> None:
    """Alternate bare and engine rounds; the first of each case is not counted."""
    fields = request_fields(arguments, arguments.steps)
    for number in range(-1, arguments.rounds):
        for case in cases:
            engine = engines[case.ahead]
            values = [{"prompt": f"prompt {i}", "seed": i, **fields} for i in range(case.requests)]
            requests = [engine.parse(value) for value in values]
            bare = bare_round(model, requests)
            milliseconds, own = await engine_round(engine, requests)
            if number >= 0:
                case.bare.append(bare)
                case.engine.append(milliseconds)
                case.model.append(own)


def main() -> None:
    """Measure, print and, if asked, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=list(BUILT_IN), help="toy, tiny-wan or folders of checkpoints")
    add("--executors", nargs="+", choices=("uni", "mp"), default=["uni", "mp"])
    add("--run-ahead", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    add("--gpu-memory-utilization", type=float, default=0.4, help="share of the device that each engine asks for")
    add("--requests", nargs="+", type=int, default=[1, 3], help="how many at once")
    add("--size", default="64x64")
    add("--num-frames", type=int, default=5)
    add("--steps", type=int, default=100, help="denoising steps of a request")
    add("--rounds", type=int, default=7)
    add("--record", action="store_true", help="append the run to docs/performance.md")
    arguments = parser.parse_args()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    cases = []
    with checkpoints(arguments.models) as folders:
        for folder in folders:
            for executor in arguments.executors:
                cases += asyncio.run(measure(folder, executor, arguments))
    raw = {
        f"{case.name} {case.executor}{' ahead' * case.ahead} {case.requests} {kind}": getattr(case, kind)
        for case in cases
        for kind in ("bare", "engine", "model")
    }
    figures = table(HEADER, [case.row() for case in cases])
    finish("Engine overhead of a denoising step", figures, raw, "milliseconds a step", record=arguments.record)


if __name__ == "__main__":
    main()
