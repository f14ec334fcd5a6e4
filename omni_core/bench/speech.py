"""Load on a speech API: a closed loop of streams of raw sound, and what a player at the other end would hear."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from omni_core.bench.client import Client, RequestFailed, Row, Target, ok
from omni_core.bench.load import BenchError
from omni_core.bench.report import Line, Spread, TableRow, cell, failures, lines, spread_of

TEXTS = (
    "The train to the coast leaves in ten minutes from platform four.",
    "She put the letter back into the drawer and said nothing about it.",
    "Please mind the gap between the door and the platform, and hold on to the rail.",
    "It rained all night, and in the morning the river had reached the garden wall.",
)
"""Used where no text is given."""

SAMPLE_BYTES = 2
_CONTAINERS = (b"RIFF", b"OggS", b"fLaC", b"ID3")


@dataclass(frozen=True)
class Speech:
    """What to ask for.

    Attributes:
        rounds: requests that each stream sends, one after another.
        warm_up: rounds before each run that are not counted.
        spread: seconds over which the first requests of the streams are spread; 0: all start together.
        sample_rate: samples a second of the answers, which are s16le, mono.
        texts: used in turn.
        model: a served name, or ``None`` to leave it out.
        voice: a voice, or ``None`` to leave it out.
        seed: request ``i`` asks for seed ``seed + i``. Without it no request has a seed.
        fields: further fields of every request; ``None`` leaves one out.
    """

    rounds: int = 3
    warm_up: int = 1
    spread: float = 0.0
    sample_rate: int = 24000
    texts: Sequence[str] = TEXTS
    model: str | None = None
    voice: str | None = None
    seed: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, index: int) -> dict[str, Any]:
        """Request ``index``: the same each time."""
        body = {
            "input": self.texts[index % len(self.texts)],
            "model": self.model,
            "voice": self.voice,
            "response_format": "pcm",
            "stream": True,
            "stream_format": "audio",
            "seed": None if self.seed is None else self.seed + index,
        }
        return {name: value for name, value in {**body, **self.fields}.items() if value is not None}

    def seconds(self, num_bytes: int) -> float:
        """How long so much sound lasts."""
        return num_bytes / (SAMPLE_BYTES * self.sample_rate)


@dataclass
class SpeechRow(Row):
    """What became of a request for speech.

    Attributes:
        stream: the stream that sent it.
        first_audio: seconds from sending it to its first sound; ``None`` if it failed, like all below.
        audio_seconds: how long its sound lasts.
        lag: seconds that its latest packet came after a player that started at the first one needed it; negative:
            it never waited; ``None`` where there is one packet.
        packets: when packets came, in seconds from the start of the run, and their bytes.
    """

    stream: int = 0
    first_audio: float | None = None
    audio_seconds: float | None = None
    lag: float | None = None
    packets: list[tuple[float, int]] = field(default_factory=list)

    @property
    def stalled(self) -> bool:
        """Whether a player that started at the first packet had to wait."""
        return self.lag is not None and self.lag > 0


@dataclass(frozen=True)
class Figures:
    """One run. Requests that failed count in ``requests`` and ``failures`` alone.

    Attributes:
        concurrency: streams.
        requests: how many were sent.
        failures: how many failed, by kind.
        stalled: how many made a player wait that started at the first packet.
        duration: seconds from the first request to the last byte.
        audio_per_second: seconds of sound made in a second of ``duration``.
        steady_audio_per_second: the same while every stream was at work; ``None`` if they never were.
        first_audio: sending a request to its first sound.
        real_time_factor: latency over the duration of the sound.
        latency: sending a request to its last byte.
        worst_lag: the largest lag of a packet.
        shortest, longest: seconds of sound of a request.
    """

    concurrency: int
    requests: int
    failures: Mapping[str, int]
    stalled: int
    duration: float
    audio_per_second: float
    steady_audio_per_second: float | None
    first_audio: Spread | None
    real_time_factor: Spread | None
    latency: Spread | None
    worst_lag: float | None
    shortest: float | None
    longest: float | None


@dataclass(frozen=True)
class SpeechRun:
    """Every stream's requests at one concurrency, and their figures."""

    figures: Figures
    rows: Sequence[SpeechRow]

    def as_json(self) -> dict[str, Any]:
        """Figures and rows, without the packets."""
        rows = [{name: value for name, value in asdict(row).items() if name != "packets"} for row in self.rows]
        return {**asdict(self.figures), "rows": rows}


class SpeechClient(Client):
    """Asks for speech."""

    async def request(self, speech: Speech, row: SpeechRow, origin: float) -> None:
        """Send request ``row.index`` and take its sound; ``row`` takes note, in seconds from ``origin``."""

        async def work(begin: float) -> None:
            headers = {"Accept-Encoding": "identity"}
            row.started, body = begin - origin, speech.body(row.index)
            async with self._http.stream("POST", "/v1/audio/speech", json=body, headers=headers) as answer:
                if not answer.is_success:
                    await answer.aread()
                    ok(answer)
                await _take(answer, speech, row, origin)

        await self.attempt(row, work)
        if row.failure is None:
            row.first_audio, row.audio_seconds = row.packets[0][0] - row.started, speech.seconds(row.num_bytes)
            row.lag = _lag(row.packets, speech) if len(row.packets) > 1 else None


async def _take(answer: httpx.Response, speech: Speech, row: SpeechRow, origin: float) -> None:
    """The packets of an answer. Raises ``RequestFailed`` where they are not the sound that was asked for."""
    kind, rate = answer.headers.get("content-type", ""), answer.headers.get("x-sample-rate")
    if kind.startswith(("text/", "application/json")):
        raise RequestFailed("bad output", f"the answer is {kind}, not sound")
    if rate not in (None, str(speech.sample_rate)):
        raise RequestFailed("bad output", f"the sound has {rate} samples a second, not {speech.sample_rate}")
    head, loud = b"", False
    try:
        async for data in answer.aiter_raw():
            if data:
                row.packets.append((time.perf_counter() - origin, len(data)))
                row.num_bytes += len(data)
                head, loud = head or data[:4], loud or any(data)
    except (httpx.RemoteProtocolError, httpx.ReadError) as error:
        raise RequestFailed("truncated", f"broken off after {speech.seconds(row.num_bytes):.2f} s: {error}") from None
    if not head:
        raise RequestFailed("bad output", "the sound is empty")
    if head.startswith(_CONTAINERS):
        raise RequestFailed("bad output", f"the sound is a file that begins with {head!r}, not raw pcm")
    if row.num_bytes % SAMPLE_BYTES:
        raise RequestFailed("truncated", f"{row.num_bytes} bytes end within a sample")
    if not loud:
        raise RequestFailed("bad output", "the sound is silent throughout")


def _lag(packets: Sequence[tuple[float, int]], speech: Speech) -> float:
    """How late the latest packet was for a player that plays without a pause from the first one on."""
    worst, before = -math.inf, 0
    for when, size in packets:
        if before:
            worst = max(worst, when - packets[0][0] - speech.seconds(before))
        before += size
    return worst


async def measure(
    target: Target, speech: Speech, concurrency: Sequence[int], say: Callable[[str], None] = lambda line: None
) -> list[SpeechRun]:
    """Run the workload once for each number of streams.

    Raises:
        BenchError: every request of the first warm-up failed.
    """
    runs: list[SpeechRun] = []
    async with SpeechClient(target) as client:
        for streams in concurrency:
            if speech.warm_up:
                say(f"warm-up at {streams} at once")
                _warmed(await _loop(client, speech, streams, speech.warm_up, 0.0), runs, say)
            say(f"{streams * speech.rounds} requests, {streams} at once")
            rows = await _loop(client, speech, streams, speech.rounds, speech.spread)
            runs.append(SpeechRun(summarize(rows, streams, speech), rows))
    return runs


def _warmed(rows: Sequence[SpeechRow], runs: Sequence[SpeechRun], say: Callable[[str], None]) -> None:
    failed = [row for row in rows if row.failure is not None]
    if failed and len(failed) == len(rows) and not runs:
        raise BenchError(f"the warm-up failed, nothing was measured: {failed[0].failure}: {failed[0].error}")
    for kind, count, first in failures(rows):
        say(f"{count} of {len(rows)} requests of the warm-up failed: {kind}: {first}")


async def _loop(client: SpeechClient, speech: Speech, streams: int, rounds: int, spread: float) -> list[SpeechRow]:
    """``streams`` at once, each of which sends ``rounds`` requests one after another."""
    origin = time.perf_counter()

    async def stream(number: int) -> list[SpeechRow]:
        rows = []
        await asyncio.sleep(number / streams * spread)
        for index in range(number, streams * rounds, streams):
            rows.append(SpeechRow(index, speech.body(index).get("seed"), stream=number))
            await client.request(speech, rows[-1], origin)
        return rows

    made = await asyncio.gather(*map(stream, range(streams)))
    return sorted((row for rows in made for row in rows), key=lambda row: row.index)


def summarize(rows: Sequence[SpeechRow], streams: int, speech: Speech) -> Figures:
    """The figures of a run."""
    good = [row for row in rows if row.latency is not None]
    lengths = [row.audio_seconds for row in good if row.audio_seconds is not None]
    begin = min(row.started for row in rows)
    duration = max((row.packets[-1][0] for row in good), default=begin) - begin
    return Figures(
        concurrency=streams,
        requests=len(rows),
        failures=dict(Counter(row.failure for row in rows if row.failure is not None)),
        stalled=sum(row.stalled for row in good),
        duration=duration,
        audio_per_second=sum(lengths) / duration if duration > 0 else 0.0,
        steady_audio_per_second=_steady(good, streams, speech),
        first_audio=spread_of(row.first_audio for row in good),
        real_time_factor=spread_of(
            row.latency / row.audio_seconds for row in good if row.latency and row.audio_seconds
        ),
        latency=spread_of(row.latency for row in good),
        worst_lag=max((row.lag for row in good if row.lag is not None), default=None),
        shortest=min(lengths, default=None),
        longest=max(lengths, default=None),
    )


def _steady(good: Sequence[SpeechRow], streams: int, speech: Speech) -> float | None:
    """Seconds of sound a second from when the last stream had begun until the first one was done."""
    by_stream = [[row for row in good if row.stream == number] for number in range(streams)]
    if not all(by_stream):
        return None
    begin = max(rows[0].started for rows in by_stream)
    end = min(rows[-1].packets[-1][0] for rows in by_stream)
    arrived = sum(size for row in good for when, size in row.packets if begin <= when <= end)
    return speech.seconds(arrived) / (end - begin) if end > begin else None


_TOLD = ("p50", "p99")
_LINES: list[Line] = [
    ("requests", lambda f: f.requests),
    ("failed", lambda f: sum(f.failures.values())),
    ("stalled", lambda f: f.stalled),
    ("audio seconds/s", lambda f: f.audio_per_second),
    ("audio seconds/s, steady", lambda f: f.steady_audio_per_second),
    *lines("first audio", _TOLD),
    *lines("real-time factor", _TOLD, ""),
    *lines("latency", _TOLD),
    ("worst lag (s)", lambda f: f.worst_lag),
    ("shortest audio (s)", lambda f: f.shortest),
    ("longest audio (s)", lambda f: f.longest),
    ("duration (s)", lambda f: f.duration),
]


def table(runs: Sequence[SpeechRun]) -> tuple[TableRow, list[TableRow]]:
    """Header and rows: a column for each run."""
    rows = [(name, *(cell(value(run.figures)) for run in runs)) for name, value in _LINES]
    return ("concurrency", *(str(run.figures.concurrency) for run in runs)), [row for row in rows if any(row[1:])]
