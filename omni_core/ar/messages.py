"""What crosses process borders for a request of an autoregressive stage: plain data in, frames of codes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_core.ar.sampling import CodeSampling

JOB_KEY = "omni"
"""Where a piece rides in ``SamplingParams.extra_args``."""

MAX_SEED = 2**62
"""Seeds are integers below this."""


@dataclass(frozen=True)
class TokenSampling:
    """How the first code of a frame is drawn: vLLM's own sampling.

    ``temperature`` 0 takes the likeliest; ``top_k`` 0 and ``top_p`` 1 mean all; the penalty looks at what was drawn.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05


@dataclass(frozen=True)
class TalkerJob:
    """One request.

    Attributes:
        prompt: what the family's ``embed_prompt`` makes the prompt from: numbers, strings, lists, bytes.
        prompt_length: how many rows it makes.
        text: text ids that are added to the frames, one to each, as far as they are known; a family's padding follows.
        max_frames: the most frames that are made.
        min_frames: before so many frames the end code is not drawn.
        seed: below ``MAX_SEED``.
        tokens: sampling of the first code group.
        codes: sampling of the others.
    """

    prompt: Mapping[str, Any]
    prompt_length: int
    text: Sequence[int] = ()
    max_frames: int = 1024
    min_frames: int = 0
    seed: int = 0
    tokens: TokenSampling = field(default_factory=TokenSampling)
    codes: CodeSampling = field(default_factory=CodeSampling)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < MAX_SEED:
            raise ValueError(f"a seed must be an integer from 0 to {MAX_SEED - 1}, got {self.seed}")


@dataclass(frozen=True)
class Piece:
    """What a worker is told with a prompt, or with the text that follows it.

    Attributes:
        key: names the request in the worker, over all of its pieces and preemptions.
        prompt: see ``TalkerJob``.
        prompt_length: see ``TalkerJob``.
        seed: see ``TalkerJob``.
        codes: see ``TalkerJob``.
        repetition_penalty: see ``TokenSampling``; vLLM's own would also look at its stand-ins for the prompt.
        text: all text ids so far, those of earlier pieces included.
        ended: keys of requests that have ended, of which the worker may forget everything.
    """

    key: str
    prompt: Mapping[str, Any]
    prompt_length: int
    seed: int
    codes: CodeSampling
    repetition_penalty: float = 1.0
    text: Sequence[int] = ()
    ended: Sequence[str] = ()

    def to_extra_args(self) -> dict[str, Any]:
        """The form that goes into ``SamplingParams.extra_args``."""
        values = asdict(self)
        return {JOB_KEY: {**values, "text": list(self.text), "ended": list(self.ended)}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> Piece:
        """Read back what ``to_extra_args`` wrote.

        Raises:
            ValueError: the request did not come through Omni's front end.
        """
        if not extra_args or JOB_KEY not in extra_args:
            raise ValueError("this engine serves Omni's own requests only")
        values = dict(extra_args[JOB_KEY])
        return cls(**{**values, "codes": CodeSampling(**values["codes"])})


@dataclass(frozen=True)
class Frames:
    """Frames that a stage has made since the last of these.

    Attributes:
        codes: int32 [frames, code groups], without the end code.
        finish_reason: ``None`` while there is more to come, else ``stop`` (the end code was drawn) or ``length``.
    """

    codes: npt.NDArray[np.int32]
    finish_reason: str | None = None
