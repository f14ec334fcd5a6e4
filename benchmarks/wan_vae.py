#!/usr/bin/env python3
"""Decoding with the VAE of Wan2.2 TI2V-5B at its genuine size, beside diffusers' own in the same run.

    python benchmarks/wan_vae.py
    python benchmarks/wan_vae.py --device cpu --tiny

Prints for each variant: milliseconds per chunk (median of all chunks but the first two of a video, the rounds of all
variants in turn so that they see the same clocks), the errors of the frames, in [0, 1], from diffusers' in true
float32, and the peak of memory beyond weights and latents. ``float32`` means what PyTorch does by default: cuDNN
convolves in TF32. Weights are random, float32, and made on the device; the variants in 16 bits round them.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from diffusers import AutoencoderKLWan

from omni_core.vllm.loading import materialise
from omni_plugin_wan22 import vae_layers
from omni_plugin_wan22.real_size import VAE_5B
from omni_plugin_wan22.vae import DTYPES, decode

Decode = Callable[[torch.Tensor], Iterator[torch.Tensor]]
TINY = {"base_dim": 8, "decoder_base_dim": 8}
WARM_UP = 2
"""Chunks of a video that are not counted: the first is of one frame, the second makes the caches."""


def main() -> None:
    """Run all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few channels and pixels, to see that it runs")
    parser.add_argument("--size", default="1280x704", help="WIDTHxHEIGHT (default: %(default)s)")
    parser.add_argument("--latent-frames", type=int, default=9, help="chunks of a video (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--no-kernels", action="store_true", help="ours without the Triton kernels")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN choose algorithms by trying them")
    arguments = parser.parse_args()
    if arguments.latent_frames <= WARM_UP:
        parser.error(f"--latent-frames must be more than {WARM_UP}")
    torch.backends.cudnn.benchmark = arguments.cudnn_benchmark
    if arguments.no_kernels:
        vae_layers.vae_kernels = None
    device = torch.device(arguments.device)
    print(f"{_name(device)}, PyTorch {torch.__version__}, {arguments.size}, {arguments.latent_frames} chunks")
    with torch.inference_mode():
        run(arguments, device)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure and print."""
    master = random_vae(device, TINY if arguments.tiny else {})
    latents = make_latents(arguments, device)
    exact = true_float32(master, latents)
    variants: dict[str, Decode] = {}
    for name in arguments.dtypes:
        for whose, make in {"diffusers": their_decode, "omni": our_decode}.items():
            variants[f"{whose} {name}"] = make(master, DTYPES[name])
    del master
    errors, peaks = {}, {}
    for name, variant in variants.items():
        begin = _start_memory(device)
        frames = [chunk.cpu() for chunk in variant(latents)]
        peaks[name] = _peak_memory(device) - begin
        difference = (torch.cat(frames) - exact).abs()
        errors[name] = difference.mean().item(), difference.max().item()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, variant in variants.items():
            times[name] += chunk_times(variant, latents, device)[WARM_UP:]
    print(f"{'variant':<20} {'ms/chunk':>9} {'min':>8} {'max':>8} {'mean error':>11} {'max error':>10} {'peak GiB':>9}")
    for name, values in times.items():
        mean, largest = errors[name]
        print(
            f"{name:<20} {statistics.median(values):9.1f} {min(values):8.1f} {max(values):8.1f} "
            f"{mean:11.2e} {largest:10.2e} {peaks[name] / 2**30:9.2f}"
        )


def random_vae(device: torch.device, changes: dict[str, int]) -> AutoencoderKLWan:
    """Of the genuine shape; matrices keep the size of what passes through them."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(**{**VAE_5B, **changes}).eval()
    materialise(vae, device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in vae.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1, generator=generator)
        elif name.endswith("gamma"):
            parameter.normal_(mean=1, std=0.1, generator=generator)
        else:
            parameter.normal_(std=1 / math.sqrt(parameter[0].numel()), generator=generator)
    return vae


def make_latents(arguments: argparse.Namespace, device: torch.device) -> torch.Tensor:
    """[1, 48, chunks, height / 16, width / 16], normal."""
    width, height = (64, 32) if arguments.tiny else map(int, arguments.size.split("x"))
    shape = (1, VAE_5B["z_dim"], arguments.latent_frames, height // 16, width // 16)
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(1), device=device)


def their_decode(master: AutoencoderKLWan, dtype: torch.dtype) -> Decode:
    """diffusers' decoder in ``dtype``, chunk by chunk as its ``AutoencoderKLWan._decode`` calls it."""
    vae = torch.nn.Module.to(copy.deepcopy(master), dtype)
    return partial(_their_chunks, vae)


def _their_chunks(vae: AutoencoderKLWan, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    cache = [None] * vae._cached_conv_counts["decoder"]
    for index, frame in enumerate(vae.post_quant_conv(latents.to(vae.dtype)).split(1, dim=2)):
        video = vae.decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=index == 0)
        video = unpatchify(video, patch_size=vae.config.patch_size)
        yield (video[0].permute(1, 2, 3, 0).float() * 0.5 + 0.5).clamp(0, 1)


def our_decode(master: AutoencoderKLWan, dtype: torch.dtype) -> Decode:
    """Ours in ``dtype``."""
    vae = torch.nn.Module.to(copy.deepcopy(master), dtype)
    vae_layers.prepare(vae)
    return partial(decode, vae)


def true_float32(master: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """diffusers' frames without TF32, on the CPU."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        return torch.cat([chunk.cpu() for chunk in _their_chunks(master, latents)])
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def chunk_times(variant: Decode, latents: torch.Tensor, device: torch.device) -> list[float]:
    """Milliseconds of every chunk of a video, each waited for."""
    times, chunks = [], variant(latents)
    while True:
        _wait(device)
        begin = time.perf_counter()
        if next(chunks, None) is None:
            return times
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begin))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _start_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else device.type


if __name__ == "__main__":
    main()
