"""How images enter the network, as in diffusers' ``WanImageToVideoPipeline``.

Wan2.2 TI2V-5B is given the first latent frame itself, clean and at timestep 0; Wan2.2 I2V A14B gets more channels
beside the noise: which frames are given, and what they show.

Encoding them takes as long as many denoising steps, so it yields after each latent frame; what is returned counts.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor

from omni_core.images import InputImage
from omni_plugin_wan22.vae import encode_chunks


@dataclass(frozen=True)
class FirstFrame:
    """The first latent frame is given.

    Attributes:
        latents: float32 [1, channels, 1, height, width], normalised.
    """

    latents: torch.Tensor

    def impose(self, latents: torch.Tensor) -> torch.Tensor:
        """``latents`` [1, channels, frames, height, width] with the given frame for their first."""
        return torch.cat([self.latents, latents[:, :, 1:]], dim=2)

    def timesteps(self, timestep: float, frames: int) -> list[float]:
        """The timestep of each frame: what is given has no noise."""
        return [0.0] + [timestep] * (frames - 1)


@dataclass(frozen=True)
class GivenFrames:
    """Any frames are given, through channels of their own.

    Attributes:
        channels: float32 [1, scale_factor_temporal + z_dim, frames, height, width]: for every video frame of a latent
            frame whether it is given, then the normalised latents of the given frames with grey between them.
    """

    channels: torch.Tensor

    def beside(self, latents: torch.Tensor) -> torch.Tensor:
        """``latents`` [1, z_dim, frames, height, width] with the channels behind them."""
        return torch.cat([latents, self.channels], dim=1)


Condition = FirstFrame | GivenFrames


def first_frame(vae: AutoencoderKLWan, image: InputImage, height: int, width: int) -> Generator[None, None, FirstFrame]:
    """``image``, resized to ``height`` x ``width`` pixels, as the first frame."""
    return FirstFrame((yield from _encode(vae, _pixels(vae, image, height, width))))


def given_frames(
    vae: AutoencoderKLWan, first: InputImage, last: InputImage | None, size: tuple[int, int, int]
) -> Generator[None, None, GivenFrames]:
    """``first`` and ``last`` as first and last of ``size``: frames, height and width of the video in pixels."""
    frames, height, width = size
    pixels = _pixels(vae, first, height, width)
    video = F.pad(pixels, (0, 0, 0, 0, 0, frames - 1))
    temporal, spatial = vae.config.scale_factor_temporal, vae.config.scale_factor_spatial
    given = pixels.new_zeros(temporal + frames - 1)  # the first latent frame stands for one video frame, told 4 times
    given[:temporal] = 1
    if last is not None:
        video[:, :, -1:] = _pixels(vae, last, height, width)
        given[-1] = 1
    mask = given.view(-1, temporal).T[None, :, :, None, None].expand(-1, -1, -1, height // spatial, width // spatial)
    latents = yield from _encode(vae, video)
    return GivenFrames(torch.cat([mask, latents], dim=1))


def _encode(vae: AutoencoderKLWan, video: torch.Tensor) -> Generator[None, None, torch.Tensor]:
    """The latents of ``video``, as ``omni_plugin_wan22.vae.encode`` gives them in one go."""
    encoded = []
    for latents in encode_chunks(vae, video):
        encoded.append(latents)
        yield
    return torch.cat(encoded, dim=2)


def _pixels(vae: AutoencoderKLWan, image: InputImage, height: int, width: int) -> torch.Tensor:
    """[1, 3, 1, height, width] in [-1, 1], on the VAE's device; the shape is forced, as in the reference."""
    processor = VideoProcessor(vae_scale_factor=vae.config.scale_factor_spatial)
    pixels: torch.Tensor = processor.preprocess(image.to_pil(), height=height, width=width)
    return pixels.to(vae.device, vae.dtype).unsqueeze(2)
