"""What crosses process borders for a request of an autoregressive stage: plain data in, frames of codes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from omni_core.ar.sampling import CodeSampling

JOB_KEY = "omni"
"""Where a piece rides in ``SamplingParams.extra_args``."""

MAX_SEED = 2**62
"""Seeds are integers below this."""

_MAX_TEXT_ID = 2**31 - 1


@dataclass(frozen=True)
class TokenSampling:
    """How the first code of a frame is drawn.

    ``temperature`` 0 takes the likeliest; ``top_k`` 0 and ``top_p`` 1 mean all; the penalty looks at what was drawn.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"temperature and top_k must be at least 0 and top_p in (0, 1], got {self}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")


@dataclass(frozen=True)
class TalkerJob:
    """One request. What it holds is checked here, since a worker that cannot read it would die with its engine.

    Attributes:
        prompt: what the family's ``embed_prompt`` makes the prompt from: numbers, strings, lists, bytes.
        prompt_length: how many rows it makes.
        text: text ids that are added to the frames, one to each, as far as they are known; a family's padding follows.
        max_frames: the most frames that are made.
        min_frames: before so many frames the end code is not drawn.
        seed: below ``MAX_SEED``.
        tokens: sampling of the first code group.
        codes: sampling of the others.

    Raises:
        ValueError: a number is out of range, or there is something that is not plain data.
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
        for name, least, most in (
            ("prompt_length", 1, None),
            ("max_frames", 1, None),
            ("min_frames", 0, None),
            ("seed", 0, MAX_SEED - 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least or (most is not None and value > most):
                limit = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ValueError(f"{name} must be an integer, {limit}, got {value!r}")
        check_text(self.text)
        check_plain("prompt", self.prompt)


def check_text(text: Sequence[int]) -> None:
    """Raise ``ValueError`` for what is no list of text ids."""
    wrong = [one for one in text if type(one) is not int or not 0 <= one <= _MAX_TEXT_ID]
    if wrong:
        raise ValueError(f"text ids must be integers from 0 to {_MAX_TEXT_ID}, got {wrong[0]!r}")


def check_plain(name: str, value: object) -> None:
    """Raise ``ValueError`` for data that would not cross to a worker as it is: arrays, tensors, objects."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        for key, one in value.items():
            check_plain(f"{name}[{key!r}]", one)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            if type(one) is not int:
                check_plain(f"{name}[{index}]", one)
    else:
        raise ValueError(f"{name} must be numbers, strings, bytes, and lists and dicts of them, not {type(value)}")


@dataclass(frozen=True)
class Piece:
    """What a worker is told with a prompt, or with the text that follows it.

    Attributes:
        key: names the request in the worker, over all of its pieces and preemptions.
        prompt: see ``TalkerJob``.
        prompt_length: see ``TalkerJob``.
        seed: see ``TalkerJob``.
        codes: see ``TalkerJob``.
        tokens: see ``TalkerJob``.
        min_frames: see ``TalkerJob``.
        text: all text ids so far, those of earlier pieces included.
        ended: keys of requests that have ended, of which the worker may forget everything.
    """

    key: str
    prompt: Mapping[str, Any]
    prompt_length: int
    seed: int
    codes: CodeSampling
    tokens: TokenSampling = field(default_factory=TokenSampling)
    min_frames: int = 0
    text: Sequence[int] = ()
    ended: Sequence[str] = ()

    def to_extra_args(self) -> dict[str, Any]:
        """The form that goes into ``SamplingParams.extra_args``: bytes, since vLLM checks and copies each number there.

        Tuples become lists.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        plain = {"prompt": dict(self.prompt), "text": list(self.text), "ended": list(self.ended)}
        sampling = {"codes": asdict(self.codes), "tokens": asdict(self.tokens)}
        return {JOB_KEY: msgspec.msgpack.encode({**values, **plain, **sampling})}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> Piece | None:
        """Read back what ``to_extra_args`` wrote; ``None`` where it did not, as in requests of vLLM's own warm-up."""
        if not extra_args or JOB_KEY not in extra_args:
            return None
        values = msgspec.msgpack.decode(extra_args[JOB_KEY])
        sampling = {"codes": CodeSampling(**values["codes"]), "tokens": TokenSampling(**values["tokens"])}
        return cls(**{**values, **sampling})


@dataclass(frozen=True)
class Frames:
    """Frames that a stage has made since the last of these.

    Attributes:
        codes: int32 [frames, code groups], without the end code.
        finish_reason: ``None`` while there is more to come, else ``stop`` (the end code was drawn) or ``length``.
    """

    codes: npt.NDArray[np.int32]
    finish_reason: str | None = None
