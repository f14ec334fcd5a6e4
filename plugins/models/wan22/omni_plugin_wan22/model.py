"""Wan text-to-video as the diffusion runtime drives it; every detail is as in diffusers' ``WanPipeline``."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import nn

from omni_core.checkpoint import Checkpoint
from omni_core.diffusion.contract import DiffusionModel, DiffusionState, StageContext
from omni_core.errors import ConfigError
from omni_core.vllm.loading import load_weights, materialise
from omni_plugin_wan22.family import read_layout
from omni_plugin_wan22.request import WanRequest
from omni_plugin_wan22.schedule import Expert, choose_experts, make_scheduler
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
        scheduler: the request's own.
        timesteps: int64 [steps], on the CPU.
        experts: the expert of each step.
        guidance: the guidance scale of each expert.
    """

    request: WanRequest
    latents: torch.Tensor
    prompt: torch.Tensor
    negative: torch.Tensor | None
    scheduler: UniPCMultistepScheduler
    timesteps: torch.Tensor
    experts: tuple[Expert, ...]
    guidance: tuple[float, float]

    @property
    def expert(self) -> Expert:
        """The expert of the current step."""
        return self.experts[self.step]


class WanModel(DiffusionModel[WanRequest, WanState]):
    """Text encoder, one or two experts, and the video VAE (always float32)."""

    def __init__(
        self,
        text: TextEncoder,
        experts: Sequence[WanTransformer],
        vae: AutoencoderKLWan,
        scheduler_config: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.text, self.experts, self.vae = text, nn.ModuleList(experts), vae
        self.scheduler_config = scheduler_config
        self.num_train_timesteps = int(scheduler_config.get("num_train_timesteps", 1000))

    @classmethod
    def load(cls, context: StageContext) -> WanModel:
        if context.dtype not in DTYPES:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise ConfigError(f"Wan runs in {allowed}, not {str(context.dtype).removeprefix('torch.')}")
        layout = read_layout(Checkpoint(context.checkpoint))
        config = TransformerConfig.from_json(layout.transformer)
        return cls(
            TextEncoder.load(context.checkpoint, context.device, context.dtype),
            [_load_expert(config, context.checkpoint / name, context) for name in layout.experts],
            _load_vae(layout.vae, context.checkpoint / "vae", context.device),
            layout.scheduler,
        ).eval()

    def start(self, request: WanRequest) -> WanState:
        guided = request.guidance_scale > 1.0
        texts = [request.prompt, request.negative_prompt] if guided else [request.prompt]
        embeddings = self.text.encode(texts, request.max_sequence_length)
        scheduler = make_scheduler(self.scheduler_config, request.flow_shift, request.num_inference_steps)
        timesteps = scheduler.timesteps
        return WanState(
            request=request,
            num_steps=len(timesteps),
            latents=self._noise(request),
            prompt=embeddings[:1],
            negative=embeddings[1:] if guided else None,
            scheduler=scheduler,
            timesteps=timesteps,
            experts=choose_experts(timesteps, request.expert_boundary, self.num_train_timesteps),
            guidance=request.guidance,
        )

    def batch_key(self, state: WanState) -> Hashable:
        return tuple(state.latents.shape), state.expert, tuple(state.prompt.shape)

    def predict(self, states: Sequence[WanState]) -> list[torch.Tensor]:
        """One velocity per state, [1, channels, frames, height, width]: one forward of the states' expert for all.

        The unconditional halves of classifier-free guidance ride in the same forward, behind the conditional ones;
        a state without guidance has none.
        """
        expert = states[0].expert
        transformer = self.experts[expert]
        guided = [state for state in states if state.negative is not None]
        rows = [*states, *guided]
        latents = torch.cat([state.latents for state in rows]).to(transformer.dtype)
        timestep = torch.stack([state.timesteps[state.step] for state in rows]).to(latents.device)
        text = torch.cat([*(state.prompt for state in states), *(s.negative for s in guided if s.negative is not None)])
        velocity = transformer(latents, timestep, text)
        unconditional = iter(velocity[len(states) :].split(1))
        return [
            _guide(conditional, next(unconditional), state.guidance[expert])
            if state.negative is not None
            else conditional
            for state, conditional in zip(states, velocity[: len(states)].split(1), strict=True)
        ]

    def advance(self, state: WanState, prediction: torch.Tensor) -> None:
        timestep = state.timesteps[state.step]
        state.latents = state.scheduler.step(prediction, timestep, state.latents, return_dict=False)[0]

    def cost(self, state: WanState) -> float:
        """Positions of the latent video, once for each half of classifier-free guidance."""
        return state.latents.numel() * (1 if state.negative is None else 2)

    def decode(self, state: WanState) -> Iterator[torch.Tensor]:
        """One latent frame a chunk: 1 video frame, then ``scale_factor_temporal`` each.

        The decoder is causal in time and carries what it needs of earlier frames in a cache, which is this iterator's
        own; so the chunks joined are what the VAE's own ``decode`` gives.
        """
        vae = self.vae
        latents = state.latents.to(vae.dtype)
        mean, std = (
            latents.new_tensor(values).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        latents = vae.post_quant_conv(latents / (1.0 / std) + mean)
        cache: list[Any] = [None] * sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())
        for index, frame in enumerate(latents.split(1, dim=2)):
            video = vae.decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
            if vae.config.patch_size is not None:
                video = unpatchify(video, patch_size=vae.config.patch_size)
            yield (video[0].permute(1, 2, 3, 0).float() * 0.5 + 0.5).clamp(0, 1)

    def _noise(self, request: WanRequest) -> torch.Tensor:
        """Standard normal latents, drawn on the CPU so that a seed means the same on every device."""
        temporal, spatial = self.vae.config.scale_factor_temporal, self.vae.config.scale_factor_spatial
        frames = (request.num_frames - 1) // temporal + 1
        channels = self.experts[0].config.in_channels
        shape = (1, channels, frames, request.height // spatial, request.width // spatial)
        if request.seed is None:
            raise ValueError("a request has its seed by the time it reaches a worker")
        generator = torch.Generator("cpu").manual_seed(request.seed)
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(self.text.encoder.device)


def _guide(conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance, in the network's dtype like the reference."""
    return unconditional + scale * (conditional - unconditional)


def _load_expert(config: TransformerConfig, folder: Path, context: StageContext) -> WanTransformer:
    with context.device:
        transformer = WanTransformer(config, context.dtype, context.attention)
    load_weights(transformer, folder, checkpoint_name)
    return transformer


def _load_vae(config: Mapping[str, Any], folder: Path, device: torch.device) -> AutoencoderKLWan:
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(dict(config))
    materialise(vae, device)
    load_weights(vae, folder)
    return vae
