"""Wan's video VAE in chunks of frames, each request with caches of its own.

The VAE is causal in time: it carries what it needs of earlier frames in a cache, and diffusers' ``AutoencoderKLWan``
keeps that cache in the object. Here it belongs to one call, so that requests can take turns. The chunks and their order
are those of ``AutoencoderKLWan.encode`` and ``decode`` (``models/autoencoders/autoencoder_kl_wan.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify, unpatchify
from torch import nn

from omni_core.vllm.loading import load_weights, materialise


def load_vae(config: Mapping[str, Any], folder: Path, device: torch.device) -> AutoencoderKLWan:
    """The VAE in float32, whatever dtype its weights are stored in.

    Raises:
        CheckpointError: the weights do not fit ``config``.
    """
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(dict(config))
    materialise(vae, device)
    load_weights(vae, folder)
    return vae


def encode(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """[1, 3, frames, height, width] in [-1, 1] to normalised latents, float32 [1, z_dim, latent frames, h, w].

    The mode of the posterior, as image to video takes it. The first frame makes one chunk and one latent frame, then
    every ``scale_factor_temporal`` frames make one.
    """
    if vae.config.patch_size is not None:
        video = patchify(video, patch_size=vae.config.patch_size)
    cache = _empty_cache(vae.encoder)
    chunks = [video[:, :, :1], *video[:, :, 1:].split(vae.config.scale_factor_temporal, dim=2)]
    encoded = [vae.encoder(chunk, feat_cache=cache, feat_idx=[0]) for chunk in chunks if chunk.shape[2]]
    mode = vae.quant_conv(torch.cat(encoded, dim=2))[:, : vae.config.z_dim]
    mean, std = _statistics(vae, mode)
    return (mode - mean) * (1.0 / std)


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """Normalised latents [1, z_dim, latent frames, h, w] to frames, float32 [n, height, width, 3] in [0, 1].

    One latent frame a chunk: 1 video frame, then ``scale_factor_temporal`` each.
    """
    mean, std = _statistics(vae, latents)
    latents = vae.post_quant_conv(latents / (1.0 / std) + mean)
    cache = _empty_cache(vae.decoder)
    for index, frame in enumerate(latents.split(1, dim=2)):
        video = vae.decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
        if vae.config.patch_size is not None:
            video = unpatchify(video, patch_size=vae.config.patch_size)
        yield (video[0].permute(1, 2, 3, 0).float() * 0.5 + 0.5).clamp(0, 1)


def _empty_cache(network: nn.Module) -> list[Any]:
    return [None] * sum(isinstance(module, WanCausalConv3d) for module in network.modules())


def _statistics(vae: AutoencoderKLWan, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of raw latents, [1, z_dim, 1, 1, 1] each."""
    mean, std = (
        like.new_tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
