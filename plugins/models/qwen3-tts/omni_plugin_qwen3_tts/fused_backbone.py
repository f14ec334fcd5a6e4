"""The talker's decoder for few rows, with kernels of its own around vLLM's attention.

vLLM's layers, compiled, launch about ten kernels a layer; here there are four and vLLM's attention, which keep weights
coming. Prompts, and what is quantised or split over devices, take vLLM's layers.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from omni_plugin_qwen3_tts.attention_kernels import rotate_heads
from omni_plugin_qwen3_tts.decode_kernels import fused_linear


class FusedBackbone:
    """Runs the layers of ``model``, whose weights are there.

    Args:
        model: vLLM's.
        pdl: see ``decode_kernels``.
    """

    def __init__(self, model: Qwen3ForCausalLM, *, pdl: bool) -> None:
        self.layers, self.norm, self.pdl = list(model.model.layers), model.model.norm, pdl

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
            attention, mlp = layer.self_attn, layer.mlp
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            qkv = x.new_empty(len(x), attention.qkv_proj.weight.shape[0])
            self._linear(x, attention.qkv_proj.weight, qkv, layer.input_layernorm)
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
            attended = attention.attn(query, key, value)
            fused_linear(attended, attention.o_proj.weight, x, residual=x, pdl=self.pdl)
            gated = x.new_empty(len(x), mlp.down_proj.weight.shape[1])
            self._linear(x, mlp.gate_up_proj.weight, gated, layer.post_attention_layernorm, swiglu=True)
            fused_linear(gated, mlp.down_proj.weight, x, residual=x, pdl=self.pdl)
        normed: torch.Tensor = self.norm(x)
        return normed

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm: nn.Module, swiglu: bool = False
    ) -> None:
        eps = norm.variance_epsilon
        fused_linear(x, weight, out, norm=norm.weight, eps=eps, swiglu=swiglu, pdl=self.pdl)  # type: ignore[arg-type]
