"""The half of an engine step that waits for the device: times, frames, and the reports that tell of both.

The model runner enqueues a step and may go on to the next before the device is done with it (run-ahead). What is left
to do then is collected here, in the order of the steps, on rank 0 alone and perhaps on another thread. So nothing here
changes what the runner goes by; what is found wrong here ends the request through its report, on every rank alike.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_core.diffusion.messages import Phase, Report
from omni_core.diffusion.results import ResultWriter
from omni_core.processes import describe

logger = init_logger(__name__)


@dataclass
class DiffusionOutput(ModelRunnerOutput):
    """A model runner's output with a report for each request that was worked on."""

    reports: dict[str, Report] = field(default_factory=dict)


@dataclass
class RunnerStats:
    """Counters since the start, or the last reset.

    Attributes:
        steps: engine steps with work.
        forwards: calls of ``predict`` by number of requests in the batch.
        seconds: time by phase.
    """

    steps: int = 0
    forwards: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data; another thread may be counting."""
        forwards = {str(size): count for size, count in dict(self.forwards).items()}
        return {"steps": self.steps, "forwards": forwards, "seconds": dict(self.seconds)}


class Moment:
    """A point in the device's work: an event on an accelerator, the time itself on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event = None if device.type == "cpu" else torch.Event(device, enable_timing=True, blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has come this far. Raises what the device reports of the work before."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """The device's seconds between two moments that have passed."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1000


@dataclass
class Delivery:
    """What the collected steps of one request came to.

    Attributes:
        writer: where its frames go; without one they are of no use on this rank.
        seconds: time by phase.
        error: what went wrong in delivering its frames.
    """

    writer: ResultWriter | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    error: str | None = None

    def abandon(self) -> None:
        """Give up what was written."""
        if self.writer is not None:
            self.writer.abandon()


@dataclass(frozen=True)
class Span:
    """Work for ``deliveries`` between two moments."""

    phase: Phase
    deliveries: Sequence[Delivery]
    begin: Moment
    end: Moment


class Chunk:
    """Frames on their way to the host.

    Args:
        frames: float [frames, height, width, 3] in [0, 1], on any device.
        as_bytes: whether they go as 0..255 instead.
        last: whether they are the request's last.
    """

    def __init__(self, frames: torch.Tensor, as_bytes: bool, last: bool) -> None:
        self._finite = torch.isfinite(frames).all().to("cpu", non_blocking=True)
        frames = frames.mul(255).round_().clamp_(0, 255).to(torch.uint8) if as_bytes else frames.float()
        self._frames = frames.to("cpu", non_blocking=True, copy=True)  # pinned memory, if it comes from a device
        self._last = last

    def deliver(self, writer: ResultWriter) -> str | None:
        """Write the frames, which must have arrived; gives the path of the result with the last.

        Raises:
            ValueError: values that are no numbers, or another number of frames than announced.
            OSError: no space is left.
        """
        if not bool(self._finite):
            raise ValueError("the model gave frames with values that are no numbers")
        writer.append(self._frames.numpy())
        return str(writer.finish()) if self._last else None


@dataclass
class StepOutput(AsyncModelRunnerOutput):
    """An engine step that was enqueued.

    Attributes:
        stats: the worker's counters.
        spans: what it did.
        dropped: requests that ended; they hold nothing after this step.
        chunk: the frames that it decoded, and whose they are.
        reports: where each request stands, as far as it was known when the step was enqueued.
    """

    stats: RunnerStats
    spans: list[Span] = field(default_factory=list)
    dropped: list[Delivery] = field(default_factory=list)
    chunk: tuple[Delivery, Chunk] | None = None
    reports: dict[str, tuple[Report, Delivery]] = field(default_factory=dict)

    def get_output(self) -> DiffusionOutput:
        """Wait for the device, write the frames, report."""
        for span in self.spans:
            span.end.wait()
            self._count(span.phase, span.end.seconds_since(span.begin), span.deliveries)
        for delivery in self.dropped:
            delivery.abandon()
        result = self._deliver()
        totals = self.stats.to_dict()
        reports = {
            request_id: replace(
                report,
                seconds=dict(delivery.seconds),
                result=result if self.chunk is not None and delivery is self.chunk[0] else None,
                error=report.error or delivery.error,
                totals=totals,
            )
            for request_id, (report, delivery) in self.reports.items()
        }
        ids = list(reports)
        index = {request_id: index for index, request_id in enumerate(ids)}
        return DiffusionOutput(req_ids=ids, req_id_to_index=index, reports=reports)

    def get_kv_connector_output(self) -> None:  # abstract from vLLM 0.33 on
        return None

    def _count(self, phase: Phase, seconds: float, deliveries: Iterable[Delivery]) -> None:
        self.stats.seconds[phase] += seconds
        for delivery in deliveries:
            delivery.seconds[phase] += seconds

    def _deliver(self) -> str | None:
        if self.chunk is None:
            return None
        delivery, chunk = self.chunk
        if delivery.writer is None or delivery.error is not None:
            return None
        try:
            return chunk.deliver(delivery.writer)
        except (OSError, ValueError) as error:
            logger.error("a request failed in decode", exc_info=error)
            delivery.error = f"decode failed: {describe(error)}"
            delivery.abandon()
            return None
