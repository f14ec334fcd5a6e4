#!/usr/bin/env python3
"""What the engine adds to a denoising step: an engine beside a bare loop over the same model, in the same run.

    python benchmarks/engine_overhead.py --rounds 7 --record

For each model and executor, rounds alternate between the bare loop (the model's contract called in this process) and
the engine (requests through ``VideoEngine``, as HTTP sends them). The figure of a round is the time between two
denoising steps while all of its requests are denoising; of rounds the median is given.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
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
    """Rounds of one model, executor and number of requests; milliseconds a step.

    ``model``: what the worker itself measures of a step: the model's part.
    """

    name: str
    executor: str
    requests: int
    bare: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    model: list[float] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """Medians, for the table."""
        bare, engine, model = median(self.bare), median(self.engine), median(self.model)
        figures = (f"{bare:.2f}", f"{engine:.2f}", f"{engine - bare:+.2f}", f"{engine / bare:.2f}")
        return (self.name, self.executor, str(self.requests), *figures, f"{engine - model:+.2f}")


HEADER = (
    "model", "executor", "requests", "bare (ms)", "engine (ms)", "engine - bare (ms)", "engine / bare",
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
    """The rounds of one model and executor, for each number of requests."""
    from omni_core.api import AsyncOmni
    from omni_core.vllm.parallel import parallel_state

    most = max(arguments.requests)
    cases = [Case(folder.name, executor, number) for number in arguments.requests]
    async with AsyncOmni(folder, distributed_executor_backend=executor, max_num_seqs=most) as omni:
        with parallel_state():  # which a worker has before it loads a model
            await alternate(omni, load_bare(omni.resolved), cases, arguments)
    return cases


async def alternate(omni: Any, model: Any, cases: Sequence[Case], arguments: argparse.Namespace) -> None:
    """Alternate bare and engine rounds; the first of each case is not counted."""
    fields = request_fields(arguments, arguments.steps)
    for number in range(-1, arguments.rounds):
        for case in cases:
            values = [{"prompt": f"prompt {i}", "seed": i, **fields} for i in range(case.requests)]
            requests = [omni.engine.parse(value) for value in values]
            bare = bare_round(model, requests)
            engine, own = await engine_round(omni.engine, requests)
            if number >= 0:
                case.bare.append(bare)
                case.engine.append(engine)
                case.model.append(own)


def main() -> None:
    """Measure, print and, if asked, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=list(BUILT_IN), help="toy, tiny-wan or folders of checkpoints")
    add("--executors", nargs="+", choices=("uni", "mp"), default=["uni", "mp"])
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
        f"{case.name} {case.executor} {case.requests} {kind}": getattr(case, kind)
        for case in cases
        for kind in ("bare", "engine", "model")
    }
    figures = table(HEADER, [case.row() for case in cases])
    finish("Engine overhead of a denoising step", figures, raw, "milliseconds a step", record=arguments.record)


if __name__ == "__main__":
    main()
