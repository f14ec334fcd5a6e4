"""Tiny random Wan checkpoints in the genuine layout, saved by the reference library's own classes. No network.

    python -m omni_plugin_wan22.checkpoints FOLDER --kind ti2v-5b
    python -m omni_plugin_wan22.checkpoints FOLDER --kind ti2v-5b --real --device cuda
    vllm serve FOLDER --omni

They show noise, but they go through every code path that a real checkpoint does. With ``--real`` they have its size
too (``real_size.py``).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

TEXT_WIDTH = 32
GAIN = 1.5
"""Of the random linear layers. At 1 or below, a tiny model hardly reacts to what it is given."""


@dataclass(frozen=True)
class Kind:
    """What tells one kind of checkpoint from another.

    Attributes:
        class_name: what ``model_index.json`` says.
        boundary_ratio: where the second expert takes over; ``None`` with one.
        expand_timesteps: one timestep per token.
        in_channels: of the transformer; 16 or 48 come out.
        flow_shift: of the scheduler.
    """

    class_name: str = "WanPipeline"
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    in_channels: int = 16
    flow_shift: float = 3.0

    @property
    def latent_channels(self) -> int:
        """Of the VAE: 48 for that of TI2V-5B."""
        return 48 if self.in_channels == 48 else 16


KINDS = {
    "t2v-a14b": Kind(boundary_ratio=0.875),
    "i2v-a14b": Kind("WanImageToVideoPipeline", boundary_ratio=0.9, in_channels=36),
    "ti2v-5b": Kind(expand_timesteps=True, in_channels=48, flow_shift=5.0),
    "t2v-2.1": Kind(),
    "dmd": Kind("WanDMDPipeline"),
}


def build_pipeline(
    *, kind: str = "", experts: int = 2, seed: int = 0, head_dim: int = 12, euler: bool = False
) -> WanPipeline | WanImageToVideoPipeline:
    """A reference pipeline with random weights, of the small sizes that a test likes.

    Args:
        kind: one of ``KINDS``; without it, ``t2v-a14b`` for two ``experts`` and ``t2v-2.1`` for one.
        experts: see ``kind``.
        seed: of the weights.
        head_dim: size of a transformer's attention head; the real one is 128.
        euler: with the scheduler ``FlowMatchEulerDiscreteScheduler`` rather than ``UniPCMultistepScheduler``.
    """
    wanted = KINDS[kind or ("t2v-a14b" if experts == 2 else "t2v-2.1")]
    generator = torch.Generator().manual_seed(seed)
    tokenizer = build_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            )
        )  # fmt: skip
        vae = _build_vae(wanted)
        count = 1 if wanted.boundary_ratio is None else 2
        transformers = [_build_transformer(head_dim, wanted) for _ in range(count)]
    # As diffusers initialises it, the encoder hardly sees its input; the decoder does, and with so few channels another
    # would amplify rounding.
    for module in (text_encoder, *transformers, vae.encoder, vae.quant_conv):
        _randomise(module, generator)
    builder = WanImageToVideoPipeline if wanted.class_name == "WanImageToVideoPipeline" else WanPipeline
    pipeline = builder(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        scheduler=build_scheduler(wanted.flow_shift, euler=euler),
        transformer=transformers[0].eval(),
        transformer_2=transformers[1].eval() if count == 2 else None,
        boundary_ratio=wanted.boundary_ratio,
        expand_timesteps=wanted.expand_timesteps,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build_scheduler(
    flow_shift: float, *, euler: bool = False
) -> UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler:
    """The scheduler of Wan's checkpoints, or the one of its conversion script."""
    if euler:
        return FlowMatchEulerDiscreteScheduler(shift=flow_shift)
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, so that every text has its own tokens; ``</s>`` ends it as in T5."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def write_checkpoint(
    folder: Path,
    *,
    kind: str = "",
    experts: int = 2,
    seed: int = 0,
    head_dim: int = 12,
    euler: bool = False,
    shard_size: str = "10GB",
) -> Path:
    """Save ``build_pipeline`` in ``folder``; weights above ``shard_size`` are split into several files."""
    pipeline = build_pipeline(kind=kind, experts=experts, seed=seed, head_dim=head_dim, euler=euler)
    pipeline.save_pretrained(folder, max_shard_size=shard_size)
    if kind and KINDS[kind].class_name != type(pipeline).__name__:  # a class that diffusers does not have
        index = folder / "model_index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": KINDS[kind].class_name}, indent=2))
    return folder


def _build_vae(kind: Kind) -> AutoencoderKLWan:
    values: dict[str, Any] = {}
    if kind.latent_channels == 48:
        values = {
            "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16,
            "decoder_base_dim": 6, "latents_mean": [0.1 * (i % 5 - 2) for i in range(48)],
            "latents_std": [0.5 + 0.1 * (i % 7) for i in range(48)],
        }  # fmt: skip
    return AutoencoderKLWan(
        base_dim=3, z_dim=kind.latent_channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True], **values,
    )  # fmt: skip


def _build_transformer(head_dim: int, kind: Kind) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=head_dim, in_channels=kind.in_channels,
        out_channels=kind.latent_channels, text_dim=TEXT_WIDTH, freq_dim=256, ffn_dim=48, num_layers=3,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Scale the weights of linear layers by their width, and make biases and norms unlike their neutral values."""
    with torch.no_grad():
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                if name == "bias":
                    parameter.copy_(noise * 0.1)
                elif isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
                    parameter.copy_(noise * GAIN / math.sqrt(parameter[0].numel()))
                elif parameter.dim() == 1 or name == "gamma":
                    parameter.copy_(1 + noise * 0.1)
                else:
                    parameter.copy_(noise)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Wan checkpoint: a tiny one, or one of genuine size.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, help="which checkpoint to resemble (default: t2v-a14b)")
    parser.add_argument("--experts", type=int, choices=(1, 2), help="without --kind; 1: t2v-2.1, 2: t2v-a14b")
    parser.add_argument("--euler", action="store_true", help="tiny only: with the Euler scheduler rather than UniPC")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", default="2GB", help="largest weight file, such as 100KB (default: 2GB)")
    parser.add_argument("--real", action="store_true", help="of genuine size, in bfloat16")
    parser.add_argument("--text-encoder", choices=("full", "tiny"), help="with --real: 5.7 billion parameters, or few")
    parser.add_argument("--device", help="with --real: where the weights are made, such as cuda (default: cpu)")
    options = parser.parse_args()
    if options.kind and options.experts:
        parser.error("--experts and --kind say the same: give one of them")
    if not options.real and (options.text_encoder or options.device):
        parser.error("--text-encoder and --device need --real")
    if options.real and options.euler:
        parser.error("--euler is for tiny checkpoints, not for --real ones")
    kind = options.kind or ("t2v-2.1" if options.experts == 1 else "t2v-a14b")
    if options.real:
        from omni_plugin_wan22.real_size import write_real_size

        write_real_size(
            options.folder,
            kind,
            text_encoder=options.text_encoder or "full",
            device=options.device or "cpu",
            seed=options.seed,
            shard_size=options.shard_size,
        )
    else:
        write_checkpoint(
            options.folder, kind=kind, seed=options.seed, euler=options.euler, shard_size=options.shard_size
        )


if __name__ == "__main__":
    main()
