"""A module for tests: a running sum with a state per session, which says how many shared the step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from omni_core.errors import CheckpointError
from omni_core.module.contract import ModuleContext, StageModule, Values


class RunningSum(StageModule[list[np.ndarray]]):
    @classmethod
    def load(cls, context: ModuleContext) -> RunningSum:
        if context.options.get("refuse"):
            raise CheckpointError(f"{context.checkpoint} is no good")
        module = cls()
        module.weight = torch.nn.Parameter(torch.ones(2))
        module.trouble = context.options.get("trouble")
        if module.trouble == "cannot":
            module.cannot_sleep = "its weights are nailed down"
        return module

    def sleep(self) -> None:
        super().sleep()
        if self.trouble == "sleep":
            raise MemoryError("no room in the host")

    def wake_up(self, context: ModuleContext) -> RunningSum:
        if self.trouble == "wake":
            self.trouble = None
            raise MemoryError("no room on the device")
        return super().wake_up(context)

    def open(self, options: Values) -> list[np.ndarray]:
        if options.get("refuse"):
            raise ValueError("this session is refused")
        return [np.zeros(2, dtype=np.float32)]

    def batch_key(self, state: list[np.ndarray], values: Values) -> Hashable:
        return values["x"].shape

    def step(self, states: Sequence[list[np.ndarray]], inputs: Sequence[Values]) -> list[dict[str, Any]]:
        if any(values.get("fail") for values in inputs):
            raise RuntimeError("the step fails")
        for state, values in zip(states, inputs, strict=True):
            state[0] = state[0] + torch.from_numpy(values["x"].copy()).sum(dim=0).numpy()
        return [{"sum": state[0], "together": len(states)} for state in states]
