"""Wan's video VAE in chunks of frames, each request with a past of its own.

The VAE is causal in time: it carries what it needs of earlier frames, and diffusers' ``AutoencoderKLWan`` keeps that in
the object. Here it belongs to one call, so that requests can take turns. The chunks and their order are those of
``AutoencoderKLWan.encode`` and ``decode`` (``models/autoencoders/autoencoder_kl_wan.py``), and so are modules and
weights; what they compute is in ``vae_layers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from omni_core.errors import ConfigError
from omni_core.vllm.loading import load_weights, materialise
from omni_plugin_wan22 import vae_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What the option ``vae_dtype`` can be."""


def read_dtype(name: str) -> torch.dtype:
    """The option ``vae_dtype`` as a dtype.

    Raises:
        ConfigError: it is none of ``DTYPES``.
    """
    if name not in DTYPES:
        raise ConfigError(f"vae_dtype is {name!r}; Wan's VAE runs in {', '.join(DTYPES)}")
    return DTYPES[name]


def load_vae(
    config: Mapping[str, Any], folder: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> AutoencoderKLWan:
    """The VAE in ``dtype``, whatever dtype its weights are stored in.

    Raises:
        CheckpointError: the weights do not fit ``config``.
    """
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(dict(config))
    nn.Module.to(vae, dtype)  # diffusers' own ``to`` warns of layers to keep in float32, of which this model has none
    materialise(vae, device)
    load_weights(vae, folder)
    vae_layers.prepare(vae)
    return vae


def encode(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """[1, 3, frames, height, width] in [-1, 1] to normalised latents, float32 [1, z_dim, latent frames, h, w].

    The mode of the posterior, as image to video takes it.
    """
    return torch.cat(list(encode_chunks(vae, video)), dim=2)


def encode_chunks(vae: AutoencoderKLWan, video: torch.Tensor) -> Iterator[torch.Tensor]:
    """What ``encode`` gives, one latent frame at a time.

    The first frame makes one chunk and one latent frame, then every ``scale_factor_temporal`` frames make one.
    """
    past = vae_layers.Past()
    for chunk in [video[:, :, :1], *video[:, :, 1:].split(vae.config.scale_factor_temporal, dim=2)]:
        if chunk.shape[2]:
            x = vae_layers.encoder(vae.encoder, _patched(vae, chunk.to(vae.dtype)), past)
            mode = vae_layers.pointwise(vae.quant_conv, x)[..., : vae.config.z_dim].permute(0, 4, 1, 2, 3).float()
            mean, std = _statistics(vae, mode)
            yield (mode - mean) * (1.0 / std)


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """Normalised latents [1, z_dim, latent frames, h, w] to frames, float32 [n, height, width, 3] in [0, 1].

    One latent frame a chunk: 1 video frame, then ``scale_factor_temporal`` each.
    """
    past = vae_layers.Past()
    mean, std = _statistics(vae, latents)
    latents = (latents / (1.0 / std) + mean).to(vae.dtype)
    for frame in latents.split(1, dim=2):
        x = vae_layers.pointwise(vae.post_quant_conv, frame.permute(0, 2, 3, 4, 1).contiguous())
        yield _pixels(vae, vae_layers.decoder(vae.decoder, x, past))


def _patched(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """[1, 3, n, height, width] to the encoder's [1, n, h, w, in_channels], as diffusers' ``patchify``."""
    size = vae.config.patch_size or 1
    x = video.unflatten(4, (-1, size)).unflatten(3, (-1, size))
    return x.permute(0, 2, 3, 5, 1, 6, 4).flatten(4).contiguous()


def _pixels(vae: AutoencoderKLWan, x: torch.Tensor) -> torch.Tensor:
    """The decoder's [1, n, h, w, out_channels], to overwrite, to frames as ``decode`` gives them (``unpatchify``)."""
    size = vae.config.patch_size or 1
    x = x[0].float().mul_(0.5).add_(0.5).clamp_(0, 1).unflatten(3, (-1, size, size))
    return x.permute(0, 1, 5, 2, 4, 3).flatten(3, 4).flatten(1, 2).contiguous()


def _statistics(vae: AutoencoderKLWan, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of raw latents, [1, z_dim, 1, 1, 1] each."""
    mean, std = (
        like.new_tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
