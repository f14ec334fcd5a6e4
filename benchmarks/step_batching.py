#!/usr/bin/env python3
"""What requests that share denoising steps gain and lose: throughput and latency beside those of one at a time.

    python benchmarks/step_batching.py --model tiny-wan --size 128x128 --record
    python benchmarks/step_batching.py --model FOLDER --size 832x480 --num-frames 81 --steps 10

One engine; rounds go over the numbers of requests in turn, so that all see the same machine; medians over rounds.
Frames stay frames: no file is written.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from common import BUILT_IN, checkpoints, finish, median, request_fields, table


@dataclass
class Level:
    """Rounds with so many requests at once.

    Attributes:
        requests: how many at once.
        wall: seconds until all were done.
        latency: mean seconds of one.
        step: seconds of the worker for a forward and what follows it.
        batch: mean number of requests in a forward.
    """

    requests: int
    wall: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    batch: list[float] = field(default_factory=list)

    def row(self, one: Level) -> tuple[str, ...]:
        """Medians, relative to ``one``."""
        throughput, alone = self.requests / median(self.wall), one.requests / median(one.wall)
        latency = median(self.latency)
        return (
            str(self.requests), f"{throughput:.3g}", f"{throughput / alone:.2f}", f"{latency:.3g}",
            f"{latency / median(one.latency):.2f}", f"{median(self.batch):.2f}", f"{1000 * median(self.step):.4g}",
        )  # fmt: skip


HEADER = (
    "requests at once", "videos/s", "relative to the first", "latency (s)", "relative", "mean batch size",
    "forward (ms)",
)  # fmt: skip


async def measure(folder: Any, arguments: argparse.Namespace) -> list[Level]:
    """Rounds over every number of requests."""
    from omni_core.api import AsyncOmni

    levels = [Level(number) for number in arguments.requests]
    options = {"distributed_executor_backend": arguments.executor} if arguments.executor else {}
    async with AsyncOmni(folder, max_num_seqs=max(arguments.requests), **options) as omni:
        for number in range(-1, arguments.rounds):  # the first is not counted
            for level in levels:
                figures = await one_round(omni.engine, level.requests, request_fields(arguments, arguments.steps))
                if number >= 0:
                    for values, value in zip(
                        (level.wall, level.latency, level.step, level.batch), figures, strict=True
                    ):
                        values.append(value)
    return levels


async def one_round(engine: Any, count: int, fields: dict[str, Any]) -> tuple[float, float, float, float]:
    """Seconds until all are done, mean latency, seconds of a forward, mean batch size."""

    async def one(index: int) -> float:
        request = engine.parse({"prompt": f"prompt {index}", "seed": index, **fields})
        begin = time.perf_counter()
        await engine.generate(request)
        return time.perf_counter() - begin

    await engine.client.stats(reset=True)
    begin = time.perf_counter()
    latencies = await asyncio.gather(*map(one, range(count)))
    wall = time.perf_counter() - begin
    stats = await engine.client.stats()
    sizes = {int(size): forwards for size, forwards in stats["forwards"].items()}
    forwards = sum(sizes.values())
    steps = sum(size * number for size, number in sizes.items())
    return wall, sum(latencies) / count, stats["seconds"]["denoise"] / forwards, steps / forwards


def main() -> None:
    """Measure, print and, if asked, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="tiny-wan", help=f"{', '.join(BUILT_IN)} or the folder of a checkpoint")
    add("--requests", nargs="+", type=int, default=[1, 2, 4], help="how many at once; the first is what others are to")
    add("--size", default="64x64")
    add("--num-frames", type=int, default=5)
    add("--steps", type=int, default=50, help="denoising steps of a request")
    add("--rounds", type=int, default=5)
    add("--executor", choices=("uni", "mp"), help="the platform's own where absent")
    add("--record", action="store_true", help="append the run to docs/performance.md")
    arguments = parser.parse_args()
    with checkpoints([arguments.model]) as [folder]:
        levels = asyncio.run(measure(folder, arguments))
    raw = {f"{level.requests} {kind}": getattr(level, kind) for level in levels for kind in ("wall", "latency", "step")}
    title = (
        f"Step batching of {folder.name} at {arguments.size}, {arguments.num_frames} frames, {arguments.steps} steps"
    )
    finish(title, table(HEADER, [level.row(levels[0]) for level in levels]), raw, "seconds", record=arguments.record)


if __name__ == "__main__":
    main()
