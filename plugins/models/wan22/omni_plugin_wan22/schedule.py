"""Which noise levels a request visits, how it steps from one to the next, and which expert works at each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

DMD_TIMESTEPS = (1000, 757, 522)
DMD_SHIFT = 8.0
"""Timesteps and shift of few-step checkpoints: ``dmd_denoising_steps`` of ``FastWan2_1_T2V_480P_Config`` and
``FastWan2_2_TI2V_5B_Config`` in FastVideo (``fastvideo/configs/pipelines/wan.py``), and the shift that its
``DmdDenoisingStage`` (``fastvideo/pipelines/stages/denoising.py``) gives its scheduler, whatever the checkpoint's."""


class Expert(IntEnum):
    """Position of an expert among the model's, high noise first; 0 where there is one."""

    HIGH_NOISE = 0
    LOW_NOISE = 1


class Sampler(Protocol):
    """One request's way from noise to a video. It holds the request's own state, so it cannot be shared.

    ``timesteps``: [steps], on the CPU.
    """

    timesteps: torch.Tensor

    def step(self, index: int, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """The latents, float32, after step ``index``, for which the network predicted ``velocity``."""


class FlowSampler:
    """UniPC or Euler with flow sigmas, as diffusers has them."""

    def __init__(self, scheduler: UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler, num_steps: int) -> None:
        scheduler.set_timesteps(num_steps)
        scheduler.set_begin_index(0)
        self.scheduler, self.timesteps = scheduler, scheduler.timesteps

    def step(self, index: int, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        # In float32: Euler would give latents of the velocity's dtype.
        stepped: torch.Tensor = self.scheduler.step(
            velocity.float(), self.timesteps[index], latents, return_dict=False
        )[0]
        return stepped


class DMDSampler:
    """Distribution matching distillation: predict the clean video, add fresh noise of the next level, repeat.

    With sigma the noise level, ``x0 = x - sigma * velocity`` and ``x' = (1 - sigma') * x0 + sigma' * noise``; after the
    last step the video is ``x0`` (FastVideo, ``DmdDenoisingStage`` and ``pred_noise_to_pred_video``). A level is that
    of 1000 shifted ones whose timestep is nearest to the wanted one, while the network is told the wanted one.

    ``generator`` is the request's own, on the CPU; it has drawn the first noise already.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.timesteps = torch.tensor(DMD_TIMESTEPS)
        levels = torch.arange(1000, 0, -1, dtype=torch.float32) / 1000
        levels = DMD_SHIFT * levels / (1 + (DMD_SHIFT - 1) * levels)
        distances = (levels * 1000 - self.timesteps[:, None]).abs()
        self.sigmas: list[float] = levels[distances.argmin(dim=1)].tolist()

    def step(self, index: int, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        clean = latents - self.sigmas[index] * velocity.float()
        if index + 1 == len(self.sigmas):
            return clean
        noise = torch.randn(latents.shape, generator=self.generator, dtype=torch.float32)
        noise = noise.to(latents.device, non_blocking=True)
        sigma = self.sigmas[index + 1]
        return (1 - sigma) * clean + sigma * noise


def flow_sampler(solver: str, config: Mapping[str, Any], flow_shift: float, num_steps: int) -> FlowSampler:
    """A sampler for one request.

    Args:
        solver: ``"unipc"`` or ``"euler"``.
        config: the checkpoint's scheduler, of either kind; its settings count where it is the one asked for.
        flow_shift: ``flow_shift`` of UniPC, ``shift`` of Euler.
        num_steps: number of denoising steps.
    """
    name = config.get("_class_name")
    train = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
    if solver == "euler":
        own = dict(config) if name == "FlowMatchEulerDiscreteScheduler" else train
        return FlowSampler(FlowMatchEulerDiscreteScheduler.from_config(own, shift=flow_shift), num_steps)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    own = dict(config) if name == "UniPCMultistepScheduler" else {**train, **flow}
    return FlowSampler(UniPCMultistepScheduler.from_config(own, flow_shift=flow_shift), num_steps)


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
