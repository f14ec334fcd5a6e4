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
