"""Random checkpoints of genuine size, to measure speed and memory where the genuine weights cannot be had.

Weights are made one by one on the chosen device and written in shards, so that no model is ever held whole. Sizes are
those of Wan's own files (``wan/configs`` of Wan2.1 and Wan2.2), and for the VAE of TI2V-5B those of FastVideo's
``fastvideo/configs/pipelines/wan.py``; the statistics of its latents are left at 0 and 1. Not checked against the
published files: UMT5's configuration, and the scheduler's shift of A14B.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import save_file
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from omni_plugin_wan22.checkpoints import KINDS, build_scheduler, build_tokenizer

DTYPE = torch.bfloat16
TEXT_WIDTH = 4096

_A14B: dict[str, Any] = {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}
_1_3B: dict[str, Any] = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "t2v-a14b": _A14B,
    "i2v-a14b": _A14B,
    "ti2v-5b": {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336},
    "t2v-2.1": _1_3B,
    "dmd": _1_3B,
}
"""What differs from ``WanTransformer3DModel``'s defaults, beside the channels; ``t2v-2.1`` and ``dmd`` are the 1.3B."""

VAE_5B: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}

TEXT_ENCODERS: dict[str, dict[str, Any]] = {
    "full": {"vocab_size": 256384, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
    "tiny": {"vocab_size": 512, "d_kv": 64, "d_ff": 256, "num_layers": 1, "num_heads": 4},
}
"""UMT5-XXL, which is 5.7 of the 6.7 billion parameters beside an expert of 5, or one layer of its width."""


def write_real_size(
    folder: Path, kind: str, *, text_encoder: str = "full", device: str = "cpu", seed: int = 0, shard_size: str = "2GB"
) -> Path:
    """Write a checkpoint of ``kind`` (see ``checkpoints.KINDS``) in bfloat16.

    Args:
        folder: where to.
        kind: whose sizes.
        text_encoder: one of ``TEXT_ENCODERS``. Its tokenizer has one token per byte.
        device: where the weights are made.
        seed: of the weights, which depend on the device too.
        shard_size: largest weight file, such as ``500MB``.
    """
    wanted = KINDS[kind]
    generator = torch.Generator(device).manual_seed(seed)
    limit = _bytes(shard_size)
    channels = {"in_channels": wanted.in_channels, "out_channels": wanted.latent_channels}
    names = ["transformer"] if wanted.boundary_ratio is None else ["transformer", "transformer_2"]
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**TRANSFORMERS[kind], **channels)
        vae = AutoencoderKLWan(**(VAE_5B if wanted.latent_channels == 48 else {}))
        encoder = UMT5EncoderModel(
            UMT5Config(d_model=TEXT_WIDTH, feed_forward_proj="gated-gelu", **TEXT_ENCODERS[text_encoder])
        )
    for name in names:
        transformer.save_config(folder / name)
        _write_weights(transformer, folder / name, "diffusion_pytorch_model", generator, limit)
    vae.save_config(folder / "vae")
    _write_weights(vae, folder / "vae", "diffusion_pytorch_model", generator, limit)
    encoder.config.save_pretrained(folder / "text_encoder")
    _write_weights(encoder, folder / "text_encoder", "model", generator, limit)
    build_tokenizer().save_pretrained(folder / "tokenizer")
    build_scheduler(wanted.flow_shift).save_pretrained(folder / "scheduler")
    _write_index(folder, kind)
    return folder


def _write_index(folder: Path, kind: str) -> None:
    wanted = KINDS[kind]
    second = [None, None] if wanted.boundary_ratio is None else ["diffusers", "WanTransformer3DModel"]
    index = {
        "_class_name": wanted.class_name,
        "_diffusers_version": diffusers.__version__,
        "boundary_ratio": wanted.boundary_ratio,
        "expand_timesteps": wanted.expand_timesteps,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", type(build_tokenizer()).__name__],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": second,
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_weights(module: nn.Module, folder: Path, stem: str, generator: torch.Generator, limit: int) -> None:
    """Shards and their index; no more than one shard is held at a time."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0
    shards: list[Path] = []

    def flush() -> None:
        file = folder / f"{stem}-{len(shards) + 1:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file.name))
        shards.append(file)
        shard.clear()

    for name, tensor in _weights(module, generator):
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > limit:
            flush()
            held = 0
        shard[name] = tensor
        held, total = held + size, total + size
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _weights(module: nn.Module, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter of a module on the meta device, once: matrices keep the size of what passes through them."""
    seen: set[int] = set()
    for prefix, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            tensor = torch.empty(parameter.shape, dtype=DTYPE, device=generator.device)
            if name == "bias":
                tensor.zero_()
            elif parameter.dim() == 1 or name == "gamma":
                tensor.fill_(1)
            else:
                fan_in = parameter.shape[-1] if name == "scale_shift_table" else parameter[0].numel()
                tensor.normal_(std=1 / math.sqrt(fan_in), generator=generator)
            yield f"{prefix}.{name}" if prefix else name, tensor


def _bytes(text: str) -> int:
    """``2GB`` to 2,000,000,000.

    Raises:
        ValueError: it is no such text.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?)B", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size is a number with a unit, such as 2GB or 500MB; got {text!r}")
    power = " KMG".index(match[2].upper() or " ")
    return int(match[1]) * int(1000**power)
