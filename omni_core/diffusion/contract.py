"""The contract between the diffusion runtime and a model family: one class, seven methods, one more if needed.

The runtime owns queueing, batching, progress, aborts, error isolation and results. A family owns its networks and
its mathematics. Work comes in units: ``start`` (text encoding, noise, schedule) with the first piece of ``prepare``,
each further piece, one denoising step (``predict`` and ``advance``), one chunk of ``decode``. An engine step is at most
one start or piece, one chunk, and a denoising step of those requests whose turn it is. The next one may be enqueued
before the device is done with it; what makes the host wait for the device, such as ``item()``, leaves it idle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from omni_core.requests import VideoRequest


class Attention(Protocol):
    """Full (not causal) scaled dot-product attention, supplied by the platform or chosen by the user.

    ``query``: [batch, query_length, heads, head_dim]; ``key`` and ``value``: [batch, key_length, heads, head_dim];
    all of one floating dtype on one device. ``scale`` defaults to ``head_dim ** -0.5``.
    Returns [batch, query_length, heads, head_dim] of the same dtype.
    """

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class StageContext:
    """What a model is loaded with.

    Attributes:
        checkpoint: local folder of the checkpoint.
        device: where the weights go.
        dtype: the dtype asked for; a family may keep parts in float32.
        attention: the attention to call.
        options: the stage's own options (``DiffusionStage.options``, as configured).
        compile: whether to compile the network's repeated blocks (``torch.nn.Module.compile``).
    """

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    attention: Attention
    options: Mapping[str, Any] = field(default_factory=dict)
    compile: bool = False


@dataclass
class DiffusionState:
    """Everything that one running request holds in a worker; a family subclasses it with its latents and schedule.

    Attributes:
        request: the validated request.
        num_steps: how many denoising steps it will take.
        step: how many it has taken; the runtime counts it, after ``advance`` returned.
    """

    request: VideoRequest
    num_steps: int
    step: int = field(default=0, init=False)


RequestT = TypeVar("RequestT", bound=VideoRequest)
StateT = TypeVar("StateT", bound=DiffusionState)


class DiffusionModel(nn.Module, ABC, Generic[RequestT, StateT]):
    """A diffusion model as the runtime drives it, with the family's own request and state.

    Every method is called under ``torch.inference_mode``, from one thread. With tensor parallelism every rank calls
    the same methods in the same order with the same arguments.
    """

    @classmethod
    @abstractmethod
    def load(cls, context: StageContext) -> Self:
        """Build the model with its weights on ``context.device``. Raises ``CheckpointError`` for a bad checkpoint."""

    @abstractmethod
    def start(self, request: RequestT) -> StateT:
        """Encode the prompt, draw the noise from the request's own seed, build the schedule."""

    def prepare(self, state: StateT) -> Iterator[None]:
        """What else must be done before the first denoising step and takes long, such as encoding a video.

        Other requests run at each ``yield``, so a piece should take no longer than a few denoising steps, and the
        iterator must hold all of its own state. Most families need none of it.
        """
        yield from ()

    def begin(self, request: RequestT) -> StateT:
        """``start`` and all of ``prepare``, for callers without other requests."""
        state = self.start(request)
        for _ in self.prepare(state):
            pass
        return state

    @abstractmethod
    def batch_key(self, state: StateT) -> Hashable:
        """Requests with equal keys may share the next ``predict``."""

    @abstractmethod
    def predict(self, states: Sequence[StateT]) -> Sequence[torch.Tensor]:
        """One network evaluation for the current step of each state, all of equal ``batch_key``.

        It must not change the states: if it raises for a batch, the runtime calls it again for each request alone, so
        that only the request at fault fails. What it returns for a state must not depend on the other states beyond
        rounding.
        """

    @abstractmethod
    def advance(self, state: StateT, prediction: torch.Tensor) -> None:
        """Take the scheduler's step: update the latents of ``state`` with its ``prediction``."""

    @abstractmethod
    def cost(self, state: StateT) -> float:
        """How much work one ``predict`` for this state is, beside that of other states; above 0.

        The number of tokens, or of tokens times forwards, will do. Running requests share the device by it: one that
        costs a tenth takes ten steps for one of the other.
        """

    @abstractmethod
    def decode(self, state: StateT) -> Iterator[torch.Tensor]:
        """Decode the final latents, chunk by chunk: float32 [frames, height, width, 3] in [0, 1], on any device.

        The chunks joined are the ``request.num_frames`` frames of the video. Other requests run between two chunks, so
        a chunk should take no longer than a few denoising steps, and the iterator must hold all of its own state.
        """
