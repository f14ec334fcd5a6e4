"""Wan as the diffusion runtime drives it, as in diffusers' ``WanPipeline`` and ``WanImageToVideoPipeline``."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from omni_core.checkpoint import Checkpoint
from omni_core.diffusion.contract import DiffusionModel, DiffusionState, StageContext
from omni_core.errors import ConfigError
from omni_core.vllm.loading import load_weights
from omni_plugin_wan22 import vae as video_vae
from omni_plugin_wan22.conditioning import Condition, FirstFrame, GivenFrames, first_frame, given_frames
from omni_plugin_wan22.family import VAE_DTYPE, Conditioning, WanLayout, read_layout
from omni_plugin_wan22.request import WanGuidedRequest, WanRequest
from omni_plugin_wan22.schedule import DMDSampler, Expert, Sampler, choose_experts, flow_sampler
from omni_plugin_wan22.text import TextEncoder
from omni_plugin_wan22.transformer import TransformerConfig, WanTransformer, checkpoint_name

DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class WanState(DiffusionState):
    """One running request.

    Attributes:
        latents: float32 [1, channels, frames, height, width] of the latent video.
        prompt: [1, tokens, width], the text embedding.
        negative: the same of the negative prompt, or ``None`` where the request runs without guidance.
        condition: what its images become; ``None`` with text alone, and until they are encoded.
        sampler: the request's own.
        experts: the expert of each step.
        guidance: the guidance scale of each expert.
    """

    request: WanRequest
    latents: torch.Tensor
    prompt: torch.Tensor
    negative: torch.Tensor | None
    condition: Condition | None
    sampler: Sampler
    experts: tuple[Expert, ...]
    guidance: tuple[float, float]

    @property
    def expert(self) -> Expert:
        """The expert of the current step."""
        return self.experts[self.step]

    @property
    def video(self) -> torch.Tensor:
        """The latents with the first frame that was given, if one was."""
        condition = self.condition
        return condition.impose(self.latents) if isinstance(condition, FirstFrame) else self.latents

    @property
    def network_input(self) -> torch.Tensor:
        """float32 [1, in_channels, frames, height, width]."""
        condition = self.condition
        return condition.beside(self.latents) if isinstance(condition, GivenFrames) else self.video


class WanModel(DiffusionModel[WanRequest, WanState]):
    """Text encoder, one or two experts, and the video VAE, which has a dtype of its own (``vae_dtype``)."""

    def __init__(
        self, text: TextEncoder, experts: Sequence[WanTransformer], vae: AutoencoderKLWan, layout: WanLayout
    ) -> None:
        super().__init__()
        self.text, self.experts, self.vae, self.layout = text, nn.ModuleList(experts), vae, layout

    @classmethod
    def load(cls, context: StageContext) -> WanModel:
        if context.dtype not in DTYPES:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise ConfigError(f"Wan runs in {allowed}, not {str(context.dtype).removeprefix('torch.')}")
        vae_dtype = video_vae.read_dtype(context.options.get("vae_dtype", VAE_DTYPE))
        layout = read_layout(Checkpoint(context.checkpoint))
        config = TransformerConfig.from_json(layout.transformer)
        return cls(
            TextEncoder.load(context.checkpoint, context.device, context.dtype),
            [_load_expert(config, context.checkpoint / name, context) for name in layout.experts],
            video_vae.load_vae(layout.vae, context.checkpoint / "vae", context.device, vae_dtype),
            layout,
        ).eval()

    def start(self, request: WanRequest) -> WanState:
        texts = [request.prompt, *request.unwanted]
        embeddings = self.text.encode(texts, request.max_sequence_length)
        if request.seed is None:
            raise ValueError("a request has its seed by the time it reaches a worker")
        generator = torch.Generator("cpu").manual_seed(request.seed)
        latents = self._noise(request, generator)
        sampler = self._sampler(request, generator)
        train = int(self.layout.scheduler.get("num_train_timesteps", 1000))
        return WanState(
            request=request,
            num_steps=len(sampler.timesteps),
            latents=latents,
            prompt=embeddings[:1],
            negative=embeddings[1:] if request.unwanted else None,
            condition=None,
            sampler=sampler,
            experts=choose_experts(sampler.timesteps, request.expert_boundary, train),
            guidance=request.guidance,
        )

    def prepare(self, state: WanState) -> Iterator[None]:
        """Encode the images; one latent frame a piece."""
        state.condition = yield from self._condition(state.request)

    def batch_key(self, state: WanState) -> Hashable:
        """With or without an image, at whatever timestep: a forward asks for equal shapes and one expert."""
        return tuple(state.latents.shape), state.expert, tuple(state.prompt.shape)

    def predict(self, states: Sequence[WanState]) -> list[torch.Tensor]:
        """One velocity per state, [1, channels, frames, height, width]: one forward of the states' expert for all.

        The unconditional halves of classifier-free guidance ride in the same forward, behind the conditional ones;
        a state without guidance has none.
        """
        expert = states[0].expert
        transformer = self.experts[expert]
        guided = [i for i, state in enumerate(states) if state.negative is not None]
        rows = [*range(len(states)), *guided]
        inputs = [state.network_input.to(transformer.dtype) for state in states]
        # Chosen on the host: an index from there would make it wait for the device.
        timesteps = _timesteps(states)[rows].to(inputs[0].device, non_blocking=True)
        negatives = [state.negative for state in states if state.negative is not None]
        text = torch.cat([*(state.prompt for state in states), *negatives])
        velocity = transformer(torch.cat([inputs[i] for i in rows]), timesteps, text)
        unconditional = iter(velocity[len(states) :].split(1))
        return [
            _guide(conditional, next(unconditional), state.guidance[expert])
            if state.negative is not None
            else conditional
            for state, conditional in zip(states, velocity[: len(states)].split(1), strict=True)
        ]

    def advance(self, state: WanState, prediction: torch.Tensor) -> None:
        state.latents = state.sampler.step(state.step, prediction, state.latents)

    def cost(self, state: WanState) -> float:
        """Positions of the latent video, once for each half of classifier-free guidance."""
        return float(state.latents.numel() * (1 if state.negative is None else 2))

    def decode(self, state: WanState) -> Iterator[torch.Tensor]:
        """One latent frame a chunk."""
        return video_vae.decode(self.vae, state.video)

    def _noise(self, request: WanRequest, generator: torch.Generator) -> torch.Tensor:
        """Standard normal latents, drawn on the CPU so that a seed means the same on every device."""
        spatial = self.layout.spatial_scale
        frames = (request.num_frames - 1) // self.layout.temporal_scale + 1
        shape = (1, self.vae.config.z_dim, frames, request.height // spatial, request.width // spatial)
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(self.text.encoder.device)

    def _sampler(self, request: WanRequest, generator: torch.Generator) -> Sampler:
        if not isinstance(request, WanGuidedRequest):
            return DMDSampler(generator)
        return flow_sampler(
            request.sample_solver, self.layout.scheduler, request.flow_shift, request.num_inference_steps
        )

    def _condition(self, request: WanRequest) -> Generator[None, None, Condition | None]:
        first, last = request.images
        if first is None:
            return None
        if self.layout.conditioning == Conditioning.FIRST_FRAME:
            return (yield from first_frame(self.vae, first, request.height, request.width))
        frames = given_frames(self.vae, first, last, (request.num_frames, request.height, request.width))
        return (yield from frames)


def _timesteps(states: Sequence[WanState]) -> torch.Tensor:
    """float32 [states, 1], or [states, frames] where one of them has a given first frame."""
    now = [float(state.sampler.timesteps[state.step]) for state in states]
    if not any(isinstance(state.condition, FirstFrame) for state in states):
        return torch.tensor(now)[:, None]
    frames = states[0].latents.shape[2]
    return torch.tensor(
        [
            state.condition.timesteps(t, frames) if isinstance(state.condition, FirstFrame) else [t] * frames
            for state, t in zip(states, now, strict=True)
        ]
    )


def _guide(conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance, in the network's dtype like the reference."""
    return unconditional + scale * (conditional - unconditional)


def _load_expert(config: TransformerConfig, folder: Path, context: StageContext) -> WanTransformer:
    with context.device:
        transformer = WanTransformer(config, context.dtype, context.attention)
    load_weights(transformer, folder, checkpoint_name)
    if context.compile:
        for block in transformer.blocks:  # all run one compiled code
            block.compile()
    return transformer
