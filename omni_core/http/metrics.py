"""Prometheus metrics of the stages, under names of their own beside vLLM's.

vLLM's own metrics count tokens; these count requests, denoising steps and seconds by phase.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_core.runtime import RequestRecord, VideoEngine
from omni_core.supervisor import StageState, SupervisedStage

BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class StageCollector(Collector):
    """Collects the metrics of one stage when they are asked for."""

    def __init__(self, stage: SupervisedStage, engine: VideoEngine) -> None:
        self.stage, self.engine = stage, engine
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
            self.phases.labels(self.stage.stage, phase).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Everything that this module's page in the documentation lists."""
        name, totals = self.stage.stage, self.stage.totals
        forwards = {int(size): count for size, count in totals.get("forwards", {}).items()}
        up = self.stage.state is StageState.RUNNING
        yield self._gauge("omni_stage_up", "1 while the stage takes requests.", up)
        yield self._gauge("omni_requests_running", "Requests that the engine has started.", self.engine.running)
        waiting = self.engine.active - self.engine.running
        yield self._gauge("omni_requests_waiting", "Requests that wait for the engine.", waiting)
        yield self._counter("omni_stage_restarts", "Times that the engine was started again.", self.stage.restarts)
        yield self._counter("omni_denoise_forwards", "Forwards of the denoising network.", sum(forwards.values()))
        yield self._counter(
            "omni_denoise_steps",
            "Denoising steps of requests; divided by the forwards, the mean batch size.",
            sum(size * count for size, count in forwards.items()),
        )
        seconds = CounterMetricFamily(
            "omni_phase_seconds", "Seconds of the worker by phase.", labels=("stage", "phase")
        )
        for phase, value in totals.get("seconds", {}).items():
            seconds.add_metric((name, phase), value)
        yield seconds
        ended = CounterMetricFamily("omni_requests", "Requests that have ended.", labels=("stage", "outcome"))
        for outcome, count in self.engine.ended.items():
            ended.add_metric((name, outcome), count)
        yield ended
        yield from self.phases.collect()

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        metric = GaugeMetricFamily(name, text, labels=("stage",))
        metric.add_metric((self.stage.stage,), float(value))
        return metric

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        metric = CounterMetricFamily(name, text, labels=("stage",))
        metric.add_metric((self.stage.stage,), value)
        return metric
