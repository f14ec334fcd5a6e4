"""Rows to figures: latencies, throughput, phases and failures, as a table and as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omni_core.bench.client import Row, VideoRow
from omni_core.bench.load import Run
from omni_core.bench.metrics import Batching
from omni_core.errors import ConfigError


@dataclass(frozen=True)
class Spread:
    """A distribution of seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """Figures of one run, or of the requests of one size in it.

    Attributes:
        requests: how many were sent.
        failures: how many failed, by kind.
        duration: seconds from the first request to the last byte of the last file.
        requests_per_second, frames_per_second, video_seconds_per_second: of finished requests over ``duration``; the
            last two are ``None`` where the files do not say.
        latency: sending it to the last byte.
        queue: until a job was no longer ``queued``.
        held_back: waiting for the client's own bound, where requests come at a rate.
        phases: mean seconds of the server's work by phase.
        checked: how many files were decoded and found good.
    """

    requests: int
    failures: Mapping[str, int]
    duration: float
    requests_per_second: float
    frames_per_second: float | None
    video_seconds_per_second: float | None
    latency: Spread | None
    queue: Spread | None
    held_back: Spread | None
    phases: Mapping[str, float]
    checked: int


def summarize(rows: Sequence[VideoRow], duration: float) -> Summary:
    """The figures of ``rows``, which took ``duration`` seconds."""
    good = [row for row in rows if row.latency is not None]
    media = [row.media for row in good if row.media is not None and row.media.frames]
    timed = [m for m in media if m.fps]
    per_second = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(rows),
        failures=dict(Counter(row.failure for row in rows if row.failure is not None)),
        duration=duration,
        requests_per_second=len(good) * per_second,
        frames_per_second=sum(m.frames for m in media) * per_second if media else None,
        video_seconds_per_second=sum(m.frames / m.fps for m in timed) * per_second if timed else None,
        latency=spread_of(row.latency for row in good),
        queue=spread_of(row.queue for row in good),
        held_back=spread_of(row.held_back for row in rows) if any(row.held_back for row in rows) else None,
        phases=_mean_phases(good),
        checked=sum(row.media is not None and row.media.deviation is not None for row in good),
    )


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """The distribution of those that are known, or ``None`` if none is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = np.percentile(known, (50, 90, 99))
    return Spread(float(np.mean(known)), float(p50), float(p90), float(p99))


def _mean_phases(rows: Sequence[VideoRow]) -> dict[str, float]:
    said = [row.seconds_by_phase for row in rows if row.seconds_by_phase is not None]
    names = dict.fromkeys(name for phases in said for name in phases)
    return {name: float(np.mean([phases.get(name, 0.0) for phases in said])) for name in names}


def by_size(run: Run) -> dict[str, Summary]:
    """The figures of each size, where there are several."""
    sizes = dict.fromkeys(row.size for row in run.rows if row.size is not None)
    if len(sizes) < 2:
        return {}
    return {size: summarize([row for row in run.rows if row.size == size], run.duration) for size in sizes}


# As a table

Line = tuple[str, Callable[[Any], float | int | None]]
TableRow = tuple[str, ...]


def lines(name: str, statistics: Sequence[str] = ("mean", "p50", "p90", "p99"), unit: str = " (s)") -> list[Line]:
    """A line for each statistic of the ``Spread`` that a summary has by this name."""
    attribute = re.sub(r"\W", "_", name)

    def line(statistic: str) -> Line:
        return f"{name} {statistic}{unit}", lambda summary: getattr(getattr(summary, attribute), statistic, None)

    return [line(statistic) for statistic in statistics]


_LINES: list[Line] = [
    ("requests", lambda s: s.requests),
    ("failed", lambda s: sum(s.failures.values())),
    ("files decoded", lambda s: s.checked),
    ("duration (s)", lambda s: s.duration),
    ("requests/s", lambda s: s.requests_per_second),
    ("frames/s", lambda s: s.frames_per_second),
    ("video seconds/s", lambda s: s.video_seconds_per_second),
    *lines("latency"),
    *lines("queue"),
    *lines("held back"),
]

_STEPS: list[tuple[str, Callable[[Batching], float | int]]] = [
    ("forwards", lambda b: b.forwards),
    ("mean batch size", lambda b: b.mean_batch_size),
    ("step (ms)", lambda b: 1000 * b.seconds_per_forward),
]


def table(runs: Sequence[Run]) -> tuple[TableRow, list[TableRow]]:
    """Header and rows: a column for each run and, where there are several, for each size in it."""
    header, summaries, steps = ["concurrency"], [], []
    for run in runs:
        name = str(run.concurrency or "any")
        sizes = by_size(run)
        header += [name, *(f"{name}, {size}" for size in sizes)]
        summaries += [summarize(run.rows, run.duration), *sizes.values()]
        steps += [run.batching, *(None for _ in sizes)]
    rows: list[TableRow] = [(name, *(cell(value(s)) for s in summaries)) for name, value in _LINES]
    for phase in dict.fromkeys(name for summary in summaries for name in summary.phases):
        rows.append((f"server's {phase}, mean (s)", *(cell(s.phases.get(phase)) for s in summaries)))
    rows += [(name, *(cell(None if b is None else of(b)) for b in steps)) for name, of in _STEPS]
    return tuple(header), [row for row in rows if any(row[1:])]


def cell(value: float | int | None) -> str:
    """A figure with three digits; empty where there is none."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def failures(rows: Iterable[Row]) -> list[TableRow]:
    """Kind, how many, and what was first said, of all failures."""
    failed = [row for row in rows if row.failure is not None]
    counts = Counter(str(row.failure) for row in failed)
    first = {str(row.failure): row.error or "" for row in reversed(failed)}
    return [(kind, str(count), first[kind]) for kind, count in counts.most_common()]


# As JSON


def write_json(path: Path, about: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Write figures and every request's row. Raises ``ConfigError`` if the file cannot be written."""
    content = {
        **about,
        "runs": [
            {
                "concurrency": run.concurrency,
                "summary": asdict(summarize(run.rows, run.duration)),
                "by_size": {size: asdict(summary) for size, summary in by_size(run).items()},
                "batching": None if run.batching is None else asdict(run.batching),
                "requests": [asdict(row) for row in run.rows],
            }
            for run in runs
        ],
    }
    write(path, json.dumps(content, indent=2, allow_nan=False))


def write(path: Path, text: str) -> None:
    """Write a file of JSON. Raises ``ConfigError`` if it cannot be written."""
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --json {path}: {error}") from None
