"""Which noise levels a request visits, how it steps from one to the next, and which expert works at each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


class HostUniPC(UniPCMultistepScheduler):  # type: ignore[misc]
    """diffusers' UniPC, whose scalars stay on the host.

    There they are copied to the device one by one, and the corrector's small system of equations is solved there; each
    of these makes the host wait for the forward of the step, so that nothing is queued behind it. What is left for the
    device here are sums of latents with factors that travel with the kernels. Formulas and their order are those of
    ``scheduling_unipc_multistep.py``: on a CPU the results are the same bits.
    """

    def multistep_uni_p_bh_update(
        self, model_output: torch.Tensor, *, sample: torch.Tensor, order: int
    ) -> torch.Tensor:
        """The predictor: ``sample``, at the step's noise level, at the next one."""
        terms = self._terms(self.step_index, order)
        if order <= 2:
            weights = [torch.tensor(0.5)] * (order - 1)
        else:
            weights = list(torch.linalg.solve(terms.matrix[:-1, :-1], terms.vector[:-1]))
        return self._move(terms, sample, weights, None)

    def multistep_uni_c_bh_update(
        self, this_model_output: torch.Tensor, *, last_sample: torch.Tensor, this_sample: torch.Tensor, order: int
    ) -> torch.Tensor:
        """The corrector: ``last_sample`` at the step's noise level, now that the model has been asked there."""
        terms = self._terms(self.step_index - 1, order)
        weights = [torch.tensor(0.5)] if order == 1 else list(torch.linalg.solve(terms.matrix, terms.vector))
        return self._move(terms, last_sample, weights, this_model_output)

    def _terms(self, now: int, order: int) -> _Terms:
        """Of the step from noise level ``now`` to the next."""
        alpha_t, sigma_t, lambda_t = self._level(now + 1)
        alpha_s, sigma_s, lambda_s = self._level(now)
        h = lambda_t - lambda_s
        ratios = [(self._level(now - i)[2] - lambda_s) / h for i in range(1, order)]
        rks = torch.stack([*ratios, torch.ones(())])
        hh = -h if self.predict_x0 else h
        phi = torch.expm1(hh)
        phi_k, factorial = phi / hh - 1, 1
        scale = hh if self.config.solver_type == "bh1" else torch.expm1(hh)
        rows, vector = [], []
        for i in range(1, order + 1):
            rows.append(torch.pow(rks, i - 1))
            vector.append(phi_k * factorial / scale)
            factorial *= i + 1
            phi_k = phi_k / hh - 1 / factorial
        keep, factor = (sigma_t / sigma_s, alpha_t) if self.predict_x0 else (alpha_t / alpha_s, sigma_t)
        return _Terms(keep, factor * phi, factor * scale, ratios, torch.stack(rows), torch.stack(vector))

    def _level(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """alpha, sigma and half of the logarithm of the signal-to-noise ratio."""
        alpha, sigma = self._sigma_to_alpha_sigma_t(self.sigmas[index])
        return alpha, sigma, torch.log(alpha) - torch.log(sigma)

    def _move(
        self, terms: _Terms, x: torch.Tensor, weights: list[torch.Tensor], newest: torch.Tensor | None
    ) -> torch.Tensor:
        """``x`` along the weighted differences of the model's outputs, the last of them that of ``newest`` if given."""
        latest = self.model_outputs[-1]
        moved = terms.keep * x - terms.latest * latest
        differences = [(self.model_outputs[-(i + 2)] - latest) / ratio for i, ratio in enumerate(terms.ratios)]
        if newest is not None:
            differences.append(newest - latest)
        products = [weight * difference for weight, difference in zip(weights, differences, strict=True)]
        moved = moved - terms.differences * (sum(products[1:], products[0]) if products else 0)
        return moved.to(x.dtype)


@dataclass(frozen=True)
class _Terms:
    """Scalars of a step of UniPC, on the host.

    Attributes:
        keep, latest, differences: factors of the sample, of the model's latest output, and of the weighted differences.
        ratios: what the difference to each earlier output is divided by.
        matrix, vector: the system whose solution are the weights.
    """

    keep: torch.Tensor
    latest: torch.Tensor
    differences: torch.Tensor
    ratios: list[torch.Tensor]
    matrix: torch.Tensor
    vector: torch.Tensor


class FlowSampler:
    """UniPC or Euler with flow sigmas, as diffusers has them. A step leaves the host free."""

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
    return FlowSampler(HostUniPC.from_config(own, flow_shift=flow_shift), num_steps)


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
