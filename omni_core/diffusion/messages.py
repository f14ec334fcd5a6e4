"""What crosses process borders for a diffusion request: the job on its way in, reports and results on their way out.

Everything is plain JSON-like data (the engine's transport carries nothing else safely), except the frames, which
stay in shared memory (``omni_core.diffusion.results``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

JOB_KEY = "omni"
"""Where a job rides in ``SamplingParams.extra_args`` and a stage's settings in ``VllmConfig.additional_config``."""

FrameType = Literal["uint8", "float32"]
"""Element type of the frames: 0..255, or 0..1."""


@dataclass(frozen=True)
class StageSettings:
    """What every process of a diffusion stage needs to know; rides in ``VllmConfig.additional_config``.

    Attributes:
        stage: the stage's name, for messages.
        family: the model family's name.
        model: ``"module:Class"`` of the ``DiffusionModel``.
        attention: ``"module:function"`` of the attention.
        request: ``"module:function"`` that gives the request model of a checkpoint.
        results: folder in shared memory into which workers write frames.
        options: the family's own stage options.
        compile: whether the model compiles its repeated blocks.
    """

    stage: str
    family: str
    model: str
    attention: str
    request: str
    results: str
    options: Mapping[str, Any] = field(default_factory=dict)
    compile: bool = False

    def to_config(self) -> dict[str, Any]:
        """The form that goes into ``additional_config``."""
        return {JOB_KEY: asdict(self)}

    @classmethod
    def from_config(cls, additional_config: Mapping[str, Any]) -> StageSettings:
        """Read back what ``to_config`` wrote."""
        return cls(**additional_config[JOB_KEY])


@dataclass(frozen=True)
class Job:
    """One request for a worker.

    Attributes:
        request: the validated request as plain data: numbers, strings, and bytes of images.
        frame_type: element type of the frames wanted.
    """

    request: dict[str, Any]
    frame_type: FrameType = "uint8"

    def to_extra_args(self) -> dict[str, Any]:
        """The form that goes into ``SamplingParams.extra_args``."""
        return {JOB_KEY: asdict(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> Job:
        """Read back what ``to_extra_args`` wrote.

        Raises:
            ValueError: the request did not come through Omni's front end.
        """
        if not extra_args or JOB_KEY not in extra_args:
            raise ValueError("this engine serves Omni's own requests only")
        return cls(**extra_args[JOB_KEY])


Phase = Literal["waiting", "encode", "denoise", "decode"]


@dataclass(frozen=True)
class Report:
    """What a worker says of one request after an engine step.

    Attributes:
        phase: the last phase in which work was done; ``waiting`` before any.
        step: denoising steps taken.
        num_steps: denoising steps in all; 0 until the request was started.
        seconds: time spent so far by phase. A batched step counts fully for each of its requests.
        result: path of the frames, once the request is done.
        error: why the request failed, once it has.
        totals: counters of the worker since it started, see ``RunnerStats``.
    """

    phase: Phase
    step: int = 0
    num_steps: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    result: str | None = None
    error: str | None = None
    totals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether this is the request's last report."""
        return self.result is not None or self.error is not None

    def to_dict(self) -> dict[str, Any]:
        """The form in which a report travels."""
        return asdict(self)
