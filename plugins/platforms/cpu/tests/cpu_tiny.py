"""Tiny checkpoints with random weights, large enough that a wrong step shows in the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1000
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_qwen3(folder: Path, *, vocabulary: int = VOCABULARY) -> None:
    """Two layers of full attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _write(Qwen3ForCausalLM, Qwen3Config(**{**COMMON, "vocab_size": vocabulary}, num_hidden_layers=2), folder)


def write_sliding(folder: Path) -> None:
    """Four layers with a window of 32 tokens and two of full attention: several groups of the KV cache."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **COMMON, num_hidden_layers=6, layer_types=layers, sliding_window=32, query_pre_attn_scalar=32
    )
    _write(Gemma3ForCausalLM, config, folder)


def _write(model_class: Any, config: Any, folder: Path) -> None:
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():  # norms and biases too: what is all ones or zeros proves nothing
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def write_qwen3_vl(folder: Path) -> None:
    """A vision encoder of two layers before two of full attention with M-RoPE; with a tokenizer of bytes."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    specials = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ]
    ids = _write_tokenizer(folder, specials)
    text = {**COMMON, "num_hidden_layers": 2, "rope_parameters": _MROPE, "rope_scaling": _MROPE}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
        text.pop(name)
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=ids["<|im_end|>"],
        tie_word_embeddings=False,
    )
    _write(Qwen3VLForConditionalGeneration, config, folder)


_MROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}


def _write_tokenizer(folder: Path, specials: list[str]) -> dict[str, int]:
    """A tokenizer of the 256 bytes and ``specials``, and a processor for images; the special tokens' ids."""
    from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: index for index, character in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=specials)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, size=size)
    videos = Qwen3VLVideoProcessor(patch_size=16, merge_size=2, temporal_patch_size=2)
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)
    return {token: tokenizer.convert_tokens_to_ids(token) for token in specials}
