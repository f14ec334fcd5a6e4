"""Tiny random Wan checkpoints in the genuine layout, saved by the reference library's own classes. No network.

    python -m omni_plugin_wan22.checkpoints FOLDER
    vllm serve FOLDER --omni

They show noise, but they go through every code path that a real checkpoint does.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

TEXT_WIDTH = 32
GAIN = 1.5
"""Of the random linear layers. At 1 or below, a tiny model hardly reacts to what it is given."""


def build_pipeline(*, experts: int = 2, seed: int = 0, head_dim: int = 12) -> WanPipeline:
    """A reference pipeline with random weights: two unlike experts as Wan 2.2 A14B has, or one as Wan 2.1 has.

    ``head_dim`` is the size of a transformer's attention head; the real one is 128.
    """
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
        vae = AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        )
        transformers = [_build_transformer(head_dim) for _ in range(experts)]
    for module in (text_encoder, *transformers):
        _randomise(module, generator)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        scheduler=scheduler,
        transformer=transformers[0].eval(),
        transformer_2=transformers[1].eval() if experts == 2 else None,
        boundary_ratio=0.875 if experts == 2 else None,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


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
    folder: Path, *, experts: int = 2, seed: int = 0, head_dim: int = 12, shard_size: str = "10GB"
) -> Path:
    """Save ``build_pipeline`` in ``folder``; weights above ``shard_size`` are split into several files."""
    pipeline = build_pipeline(experts=experts, seed=seed, head_dim=head_dim)
    pipeline.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def _build_transformer(head_dim: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=head_dim, in_channels=16, out_channels=16,
        text_dim=TEXT_WIDTH, freq_dim=256, ffn_dim=48, num_layers=3, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Scale the weights of linear layers by their width, and make biases and norms unlike their neutral values."""
    with torch.no_grad():
        for layer in module.modules():
            for name, parameter in layer.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                if name == "bias":
                    parameter.copy_(noise * 0.1)
                elif isinstance(layer, nn.Linear | nn.Conv3d):
                    parameter.copy_(noise * GAIN / math.sqrt(parameter[0].numel()))
                elif parameter.dim() == 1:
                    parameter.copy_(1 + noise * 0.1)
                else:
                    parameter.copy_(noise)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Wan checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, choices=(1, 2), default=2, help="1: like Wan 2.1; 2: like Wan 2.2 A14B")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-size", default="10GB", help="largest weight file, such as 100KB")
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, experts=arguments.experts, seed=arguments.seed, shard_size=arguments.shard_size)


if __name__ == "__main__":
    main()
