"""Load on a server: warm-up, then one run of the workload for each bound on concurrency."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from omni_core.bench.check import BadOutput, Media, check, decode, probe
from omni_core.bench.client import Target, VideoClient, VideoRow
from omni_core.bench.metrics import Batching, Counters, read_counters
from omni_core.bench.workload import Planned, Workload
from omni_core.errors import OmniError


class BenchError(OmniError):
    """A measurement cannot be made."""

    exit_code = 1


@dataclass
class Run:
    """The workload, once.

    Attributes:
        concurrency: most requests under way at once; ``None``: no bound.
        rows: one for each request, in the workload's order.
        batching: what the server's metrics say of its steps meanwhile, where they do.
        samples: files by index of their request, until they are checked.
    """

    concurrency: int | None
    rows: list[VideoRow] = field(default_factory=list)
    batching: Batching | None = None
    samples: dict[int, bytes] = field(default_factory=dict)

    @property
    def duration(self) -> float:
        """Seconds from the first request to the last byte of the last file."""
        ends = [row.started + row.latency for row in self.rows if row.latency is not None]
        return max(ends) - min(row.started for row in self.rows) if ends else 0.0


async def measure(
    target: Target,
    workload: Workload,
    *,
    concurrency: Sequence[int | None],
    warm_up: int = 1,
    check_each: int = 2,
    say: Callable[[str], None] = lambda line: None,
) -> list[Run]:
    """Run the workload once for each bound of ``concurrency``.

    Args:
        target: the server.
        workload: what to ask for.
        concurrency: most requests under way at once; ``None``: no bound.
        warm_up: requests for each size before the first run; they are not counted.
        check_each: how many files of each size are decoded and looked at, in each run.
        say: takes a line on what is going on.

    Raises:
        BenchError: a request of the warm-up failed.
    """
    async with VideoClient(target) as client:
        for planned in workload.warm_up(warm_up):
            say(f"warm-up{f' at {planned.size}' if planned.size else ''}")
            await _warm_up(client, planned, workload)
        runs = []
        for bound in concurrency:
            say(f"{workload.num_requests} requests, {f'{bound} at once' if bound else 'as many at once as are due'}")
            runs.append(await _run(client, workload, bound, check_each))
        return runs


async def _warm_up(client: VideoClient, planned: Planned, workload: Workload) -> None:
    row = VideoRow(planned.index)
    data = await client.request(planned, row)
    if data is not None:
        await _inspect(decode, data, planned, workload, row)
    if row.failure is not None:
        raise BenchError(f"the warm-up failed, nothing was measured: {row.failure}: {row.error}")


async def _run(client: VideoClient, workload: Workload, bound: int | None, check_each: int) -> Run:
    plan = workload.plan()
    run = Run(bound, [VideoRow(p.index, p.fields.get("seed"), size=str(p.size) if p.size else None) for p in plan])
    samples = choose_samples(plan, check_each)
    gate = asyncio.Semaphore(bound) if bound else nullcontext()
    before = await _counters(client)
    begin = time.perf_counter()

    async def one(planned: Planned) -> None:
        await asyncio.sleep(begin + planned.due - time.perf_counter())
        row = run.rows[planned.index]
        async with gate:
            row.started = time.perf_counter() - begin
            if math.isfinite(workload.request_rate):
                row.held_back = max(0.0, row.started - planned.due)
            data = await client.request(planned, row)
        if data is None:
            return
        await _inspect(probe, data, planned, workload, row)
        if planned.index in samples and row.failure is None:
            run.samples[planned.index] = data

    async with asyncio.TaskGroup() as group:
        for planned in plan:
            group.create_task(one(planned))
    after = await _counters(client)
    run.batching = after.since(before) if before and after else None
    for index in sorted(run.samples):  # only now: decoding would take the processor from what is measured
        await _inspect(decode, run.samples.pop(index), plan[index], workload, run.rows[index])
    return run


def choose_samples(plan: Sequence[Planned], each: int) -> set[int]:
    """Indices of up to ``each`` requests of every size, evenly spread over the plan."""
    by_size: defaultdict[str, list[int]] = defaultdict(list)
    for planned in plan:
        by_size[str(planned.size)].append(planned.index)
    return {
        indices[round(i * (len(indices) - 1) / max(1, each - 1))] for indices in by_size.values() for i in range(each)
    }


async def _inspect(
    look: Callable[[bytes], Media], data: bytes, planned: Planned, workload: Workload, row: VideoRow
) -> None:
    """Look at a file in a thread and note what is in it; one that is not what was asked for fails its request."""
    try:
        row.media = await asyncio.get_running_loop().run_in_executor(None, partial(look, data))
        check(row.media, planned, workload)
    except BadOutput as error:
        row.fail("bad output", str(error))


async def _counters(client: VideoClient) -> Counters | None:
    text = await client.text("/metrics")
    return None if text is None else read_counters(text)
