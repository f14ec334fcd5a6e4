"""What a family supplies of a module stage: networks that gain nothing from a token engine, such as a codec's decoder.

A request opens a session, pushes inputs into it one after the other, gets one output for each, and closes it. Inputs
of different sessions that wait at the same time are taken together where their ``batch_key`` is equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import nn

Values = Mapping[str, Any]
"""Plain data that crosses processes: numbers, strings, bytes, lists, and numpy arrays."""


@dataclass(frozen=True)
class ModuleContext:
    """What a module is loaded with.

    Attributes:
        checkpoint: local folder of the checkpoint.
        device: where to put the weights.
        dtype: element type of the computation.
        options: the family's own options of the stage.
    """

    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)


StateT = TypeVar("StateT")


class StageModule(nn.Module, ABC, Generic[StateT]):
    """A network as the module stage drives it, with the family's own state of a session.

    Every method but ``load``, ``sleep`` and ``wake_up`` is called under ``torch.inference_mode``, all from one thread.
    An exception fails the sessions of its call and no other.

    Attributes:
        cannot_sleep: why it cannot sleep, a sentence for the operator; empty where it can.
    """

    cannot_sleep: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def load(cls, context: ModuleContext) -> Self:
        """Build the module with its weights on ``context.device``. Raises ``CheckpointError`` for a bad checkpoint."""

    @abstractmethod
    def open(self, options: Values) -> StateT:
        """The state of a new session."""

    def close(self, state: StateT) -> None:
        """Take back what ``open`` gave, such as a place in a pool. Called once for each state, also after a failure."""

    @abstractmethod
    def batch_key(self, state: StateT, values: Values) -> Hashable:
        """Sessions with equal keys may share a step."""

    @abstractmethod
    def step(self, states: Sequence[StateT], inputs: Sequence[Values]) -> Sequence[Values]:
        """Take one input of each session, all of equal ``batch_key``, and give one output for each.

        What it gives for a session must not depend on the others beyond rounding.
        """

    def sleep(self) -> None:
        """Give up the memory of the device; no session is open. Parameters and buffers go to host memory.

        A module that holds other tensors there, or their addresses, such as recorded graphs do, overrides this and
        ``wake_up``: it may drop everything here and read the checkpoint again there.
        """
        self.to("cpu")

    def wake_up(self, context: ModuleContext) -> Self:
        """Undo ``sleep``, and give the module to go on with: this one, or another that does the same.

        ``context`` is what ``load`` got. Where this raises, the module still sleeps, and may be woken again.
        """
        self.to(context.device)
        return self
