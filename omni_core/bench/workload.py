"""What a load client asks for: a list of requests, with when each is due, that is the same for the same seed."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_core.errors import ConfigError

PROMPTS = (
    "A red ball rolls over grass",
    "Waves break on a rocky shore at sunset, seen from above",
    "A cat in a space suit walks over the moon",
    "Rain runs down a window while the lights of a city blur behind it",
)
"""Used where no file of prompts is given."""

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)(?::(\d+(?:\.\d+)?))?")
_NAME = re.compile(r"[A-Za-z_][\w.\[\]-]*")


@dataclass(frozen=True)
class Size:
    """A size in pixels, and how often it is drawn in relation to the others; ``None``: in turn."""

    width: int
    height: int
    weight: float | None = None

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Planned:
    """One request of a workload.

    Attributes:
        index: its place in the workload.
        size: the size asked for, or ``None`` where that is left to the server.
        fields: the body.
        due: seconds after the start at which it is to be sent.
    """

    index: int
    size: Size | None
    fields: Mapping[str, Any]
    due: float = 0.0


@dataclass(frozen=True)
class Workload:
    """What to ask for.

    Attributes:
        num_requests: how many requests.
        model: a served name, or ``None`` to leave it out.
        sizes: drawn in turn, or at random where one has a weight.
        num_frames: number of frames; excludes ``seconds``.
        seconds: duration of each video.
        num_inference_steps: denoising steps.
        fields: further fields of every request.
        prompts: used in turn.
        seed: of the workload; request ``i`` then asks for seed ``seed + i``. Without it no request has a seed.
        request_rate: requests per second, Poisson; infinite: all are due at once.
    """

    num_requests: int
    model: str | None = None
    sizes: Sequence[Size] = ()
    num_frames: int | None = None
    seconds: float | None = None
    num_inference_steps: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[str] = PROMPTS
    seed: int | None = None
    request_rate: float = math.inf

    @property
    def fps(self) -> float | None:
        """The frames per second asked for, if any."""
        value = self.fields.get("fps")
        return float(value) if isinstance(value, int | float) else None

    def plan(self) -> list[Planned]:
        """Every request, in order; the same list each time."""
        chance = random.Random(self.seed or 0)
        due, planned = 0.0, []
        for index in range(self.num_requests):
            size = self._size(index, chance)
            planned.append(Planned(index, size, self._body(index, size), due))
            due += chance.expovariate(self.request_rate) if math.isfinite(self.request_rate) else 0.0
        return planned

    def warm_up(self, each: int) -> list[Planned]:
        """``each`` requests for every size."""
        sizes: list[Size | None] = list({str(size): size for size in self.sizes}.values())
        return [Planned(i, size, self._body(i, size)) for size in sizes or [None] for i in range(each)]

    def _size(self, index: int, chance: random.Random) -> Size | None:
        if not self.sizes:
            return None
        if all(size.weight is None for size in self.sizes):
            return self.sizes[index % len(self.sizes)]
        return chance.choices(self.sizes, [1.0 if size.weight is None else size.weight for size in self.sizes])[0]

    def _body(self, index: int, size: Size | None) -> dict[str, Any]:
        """Only what was asked for, since a server may refuse what it does not know."""
        body = {
            "prompt": self.prompts[index % len(self.prompts)],
            "model": self.model,
            "size": None if size is None else str(size),
            "num_frames": self.num_frames,
            "seconds": None if self.seconds is None else f"{self.seconds:g}",  # a string, as OpenAI has it
            "num_inference_steps": self.num_inference_steps,
            "seed": None if self.seed is None else self.seed + index,
        }
        return {name: value for name, value in {**body, **self.fields}.items() if value is not None}


def parse_size(text: str) -> Size:
    """``832x480`` or, with a weight, ``832x480:3``. Raises ``ConfigError``."""
    found = _SIZE.fullmatch(text)
    if found is None or (found[3] is not None and float(found[3]) == 0):
        raise ConfigError(f"--size {text!r} must look like 832x480, or 832x480:3 with a weight above 0")
    return Size(int(found[1]), int(found[2]), None if found[3] is None else float(found[3]))


def parse_field(text: str) -> tuple[str, Any]:
    """``name=value``, where the value is JSON or, if it is not, a string. Raises ``ConfigError``."""
    name, equals, value = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(f"--field {text!r} must look like name=value")
    try:
        return name, json.loads(value, parse_constant=_no_number)
    except ValueError:
        return name, value


def _no_number(text: str) -> float:
    """``NaN`` and ``Infinity`` are no JSON, though Python reads them."""
    raise ValueError(text)


def read_prompts(path: Path, flag: str = "--prompt-file") -> list[str]:
    """One prompt a line of the file of ``flag``; empty lines are skipped. Raises ``ConfigError``."""
    try:
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {flag} {path}: {error}") from None
    if not prompts:
        raise ConfigError(f"{flag} {path} is empty; it takes one text a line")
    return prompts
