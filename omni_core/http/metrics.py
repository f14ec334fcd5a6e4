"""Prometheus metrics of the stages, under names of their own beside vLLM's.

vLLM's own metrics count tokens; these count requests, denoising steps and seconds by phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_core.runtime import RequestRecord
from omni_core.stages import SupervisedDiffusion
from omni_core.supervisor import StageState, SupervisedStage

BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class FrontEnd(Protocol):
    """What is counted of a front end, such as ``VideoEngine``."""

    active: int
    running: int
    ended: Counter[str]
    on_end: Callable[[RequestRecord], None]


class StageCollector(Collector):
    """Collects the metrics of a pipeline when they are asked for; requests are counted at its front stage.

    Args:
        stages: the stages by name, the front one first.
        engine: the front end.
    """

    def __init__(self, stages: Mapping[str, SupervisedStage[Any]], engine: FrontEnd) -> None:
        self.stages, self.engine = stages, engine
        self.front = next(iter(stages))
        self.phases = Histogram(
            "omni_request_phase_seconds",
            "Seconds that ended requests spent waiting (queue), and in each phase of their work.",
            ("stage", "phase"),
            buckets=BUCKETS,
            registry=None,
        )
        engine.on_end = self._ended

    def _ended(self, record: RequestRecord) -> None:
        for phase, seconds in record.seconds.items():
            self.phases.labels(self.front, phase).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Everything that this module's page in the documentation lists."""
        up = {name: stage.state is StageState.RUNNING for name, stage in self.stages.items()}
        yield _family(GaugeMetricFamily, "omni_stage_up", "1 while the stage takes requests.", up)
        restarts = {name: stage.restarts for name, stage in self.stages.items()}
        yield _family(CounterMetricFamily, "omni_stage_restarts", "Times that the engine was started again.", restarts)
        running = {self.front: self.engine.running}
        yield _family(GaugeMetricFamily, "omni_requests_running", "Requests that the engine has started.", running)
        waiting = {self.front: self.engine.active - self.engine.running}
        yield _family(GaugeMetricFamily, "omni_requests_waiting", "Requests that wait for the engine.", waiting)
        for name, stage in self.stages.items():
            if isinstance(stage, SupervisedDiffusion):
                yield from _denoising(name, stage.totals)
        ended = CounterMetricFamily("omni_requests", "Requests that have ended.", labels=("stage", "outcome"))
        for outcome, count in self.engine.ended.items():
            ended.add_metric((self.front, outcome), count)
        yield ended
        yield from self.phases.collect()


def _denoising(name: str, totals: Mapping[str, Any]) -> Iterator[Metric]:
    """What a diffusion stage counts."""
    forwards = {int(size): count for size, count in totals.get("forwards", {}).items()}
    yield _family(
        CounterMetricFamily,
        "omni_denoise_forwards",
        "Forwards of the denoising network.",
        {name: sum(forwards.values())},
    )
    yield _family(
        CounterMetricFamily,
        "omni_denoise_steps",
        "Denoising steps of requests; divided by the forwards, the mean batch size.",
        {name: sum(size * count for size, count in forwards.items())},
    )
    seconds = CounterMetricFamily("omni_phase_seconds", "Seconds of the worker by phase.", labels=("stage", "phase"))
    for phase, value in totals.get("seconds", {}).items():
        seconds.add_metric((name, phase), value)
    yield seconds


FamilyT = TypeVar("FamilyT", GaugeMetricFamily, CounterMetricFamily)


def _family(kind: type[FamilyT], name: str, text: str, values: Mapping[str, float]) -> FamilyT:
    """One number for each stage."""
    metric = kind(name, text, labels=("stage",))
    for stage, value in values.items():
        metric.add_metric((stage,), float(value))
    return metric
