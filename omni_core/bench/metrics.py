"""What a server's Prometheus metrics say of its denoising steps, where it is one of ours."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(omni_\w+)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Batching:
    """Denoising while a workload ran.

    Attributes:
        forwards: forwards of the denoising network.
        mean_batch_size: requests in a forward.
        seconds_per_forward: the worker's time for a forward and the scheduler's step after it.
    """

    forwards: int
    mean_batch_size: float
    seconds_per_forward: float


@dataclass(frozen=True)
class Counters:
    """Counters of a server, over its stages."""

    forwards: float
    steps: float
    seconds: float

    def since(self, before: Counters) -> Batching | None:
        """What happened between two readings; ``None`` if nothing did, or the server was started again."""
        forwards = self.forwards - before.forwards
        if forwards <= 0:
            return None
        steps, seconds = self.steps - before.steps, self.seconds - before.seconds
        return Batching(int(forwards), steps / forwards, seconds / forwards)


def read_counters(text: str) -> Counters | None:
    """Read the text of ``/metrics``; ``None`` where it has no ``omni_denoise_forwards_total``."""
    forwards = steps = seconds = 0.0
    seen = False
    for name, labels, value in _SAMPLE.findall(text):
        if name == "omni_denoise_forwards_total":
            forwards, seen = forwards + float(value), True
        elif name == "omni_denoise_steps_total":
            steps += float(value)
        elif name == "omni_phase_seconds_total" and 'phase="denoise"' in labels:
            seconds += float(value)
    return Counters(forwards, steps, seconds) if seen else None
