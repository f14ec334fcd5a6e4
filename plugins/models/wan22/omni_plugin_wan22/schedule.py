"""Which noise levels a request visits, and which expert works at each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler


class Expert(IntEnum):
    """Position of an expert among the model's: ``transformer`` and ``transformer_2`` of the checkpoint."""

    HIGH_NOISE = 0
    LOW_NOISE = 1


def make_scheduler(config: Mapping[str, Any], flow_shift: float, num_steps: int) -> UniPCMultistepScheduler:
    """A scheduler for one request: it holds the request's last model outputs, so it cannot be shared."""
    scheduler = UniPCMultistepScheduler.from_config(dict(config), flow_shift=flow_shift)
    scheduler.set_timesteps(num_steps)
    scheduler.set_begin_index(0)
    return scheduler


def choose_experts(
    timesteps: torch.Tensor, boundary_ratio: float | None, num_train_timesteps: int
) -> tuple[Expert, ...]:
    """The expert of each step: the low-noise one strictly below the boundary, as in diffusers' ``WanPipeline``.

    ``boundary_ratio`` is a share of ``num_train_timesteps``; with ``None`` there is one expert for all steps.
    """
    if boundary_ratio is None:
        return (Expert.HIGH_NOISE,) * len(timesteps)
    boundary = boundary_ratio * num_train_timesteps
    return tuple(Expert.HIGH_NOISE if t >= boundary else Expert.LOW_NOISE for t in timesteps.tolist())
