"""The talker's decoder for few rows, with kernels of its own around vLLM's attention.

vLLM's layers, compiled, launch about ten kernels a layer; here there are four and vLLM's attention, which keep weights
coming. Prompts, and what is quantised or split over devices, take vLLM's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from omni_speech_codec.attention_kernels import DecodeAttention, rotate_heads
from omni_speech_codec.decode_kernels import fused_linear


@dataclass(frozen=True)
class DecodingCache:
    """vLLM's cache of a layer in a step of which every request decodes one row; see ``DecodeAttention``."""

    cache: tuple[torch.Tensor, torch.Tensor]
    block_table: torch.Tensor
    slots: torch.Tensor


def decoding_cache(layer: str, head_dim: int) -> DecodingCache | None:
    """Of the step that runs; ``None`` where there is no cache yet, where a request takes several rows, and where the
    attention backend keeps keys otherwise than FlashAttention and Triton attention do."""
    context = get_forward_context()
    metadata, slots = context.attn_metadata, context.slot_mapping
    metadata = metadata.get(layer) if isinstance(metadata, dict) else None
    slots = slots.get(layer) if isinstance(slots, dict) else None
    table = getattr(metadata, "block_table", None)
    if table is None or slots is None or getattr(metadata, "max_query_len", 0) != 1:
        return None
    cache = context.no_compile_layers[layer].kv_cache
    if cache.dim() == 4 and cache.shape[-1] == 2 * head_dim:  # [blocks, heads, block size, keys and values], 0.33
        keys, values = cache.transpose(1, 2).split(head_dim, dim=-1)
    elif cache.dim() == 5 and cache.shape[0] == 2:  # [keys and values, blocks, block size, heads, head_dim], 0.32
        keys, values = cache.unbind(0)
    else:
        return None
    if keys.dtype not in (torch.float16, torch.bfloat16, torch.float32) or keys.stride() != values.stride():
        return None
    return DecodingCache((keys, values), table, slots)


class FusedBackbone:
    """Runs the layers of ``model``, whose weights are there.

    Args:
        model: vLLM's.
        most_rows: of a batch.
        pdl: see ``decode_kernels``.
    """

    def __init__(self, model: Qwen3ForCausalLM, most_rows: int, *, pdl: bool) -> None:
        self.layers, self.norm, self.pdl = list(model.model.layers), model.model.norm, pdl
        first = self.layers[0].self_attn
        device = first.qkv_proj.weight.device
        self._attend = DecodeAttention(first.num_heads, first.num_kv_heads, first.head_dim, most_rows, device)

    @staticmethod
    def fits(model: Qwen3ForCausalLM) -> bool:
        """Whether all layers are on one device and their weights are plain matrices."""
        attention = model.model.layers[0].self_attn
        whole = attention.num_heads == attention.total_num_heads and len(model.model.layers) == (
            model.config.num_hidden_layers
        )
        return whole and model.quant_config is None and attention.qkv_proj.bias is None

    def __call__(self, positions: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """int64 [n] and [n, hidden] to the last hidden states [n, hidden]."""
        x = embeds.clone()
        for layer in self.layers:
            attention = layer.self_attn
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            qkv = x.new_empty(len(x), attention.qkv_proj.weight.shape[0])
            self._linear(x, attention.qkv_proj.weight, qkv, layer.input_layernorm)
            paged = decoding_cache(attention.attn.layer_name, attention.head_dim)
            if paged is not None:
                attended = self._attend(
                    qkv,
                    positions,
                    attention.rotary_emb.cos_sin_cache,
                    attention.q_norm.weight,
                    attention.k_norm.weight,
                    attention.q_norm.variance_epsilon,
                    paged.cache,
                    paged.block_table,
                    paged.slots,
                    x.new_empty(len(x), heads * attention.head_dim),
                    pdl=self.pdl,
                )
                self._after_attention(layer, attended, x)
                continue
            rotate_heads(
                qkv,
                positions,
                attention.rotary_emb.cos_sin_cache,
                attention.q_norm.weight,
                attention.k_norm.weight,
                heads,
                kv_heads,
                attention.q_norm.variance_epsilon,
                pdl=self.pdl,
            )
            query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
            self._after_attention(layer, attention.attn(query, key, value), x)
        normed: torch.Tensor = self.norm(x)
        return normed

    def _after_attention(self, layer: Any, attended: torch.Tensor, x: torch.Tensor) -> None:
        mlp = layer.mlp
        fused_linear(attended, layer.self_attn.o_proj.weight, x, residual=x, pdl=self.pdl)
        gated = x.new_empty(len(x), mlp.down_proj.weight.shape[1])
        self._linear(x, mlp.gate_up_proj.weight, gated, layer.post_attention_layernorm, swiglu=True)
        fused_linear(gated, mlp.down_proj.weight, x, residual=x, pdl=self.pdl)

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm: nn.Module, swiglu: bool = False
    ) -> None:
        eps = norm.variance_epsilon
        fused_linear(x, weight, out, norm=norm.weight, eps=eps, swiglu=swiglu, pdl=self.pdl)  # type: ignore[arg-type]
