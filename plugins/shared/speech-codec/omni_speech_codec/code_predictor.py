"""The code predictor: from a frame's hidden state and first code to its other codes, one after another.

A decoder like Qwen3's with a head and an embedding table for each group. Of a frame it sees ``num_code_groups``
positions: the hidden state, then the codes as they are drawn, all but the last. Nothing is carried from frame to frame.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from omni_core.ar.contract import ChooseCodes

Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [n, key-value heads, positions, head_dim] each."""


class Layer(nn.Module):
    """Attention with normalised queries and keys, then SwiGLU, each before a residual sum."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.sizes = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(self.sizes[0], hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """``x``: [n, positions, hidden]; ``cos``, ``sin``: [positions, head_dim]. Gives such, and a longer cache."""
        query, key, value = self.qkv_proj(self.input_layernorm(x)).split(self.sizes, dim=-1)
        query = _rotate(self.q_norm(self._heads(query)), cos, sin)
        key = torch.cat([cache[0], _rotate(self.k_norm(self._heads(key)), cos, sin)], dim=2)
        value = torch.cat([cache[1], self._heads(value)], dim=2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1, enable_gqa=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up), (key, value)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class CodePredictorModel(nn.Module):
    """The decoder and its heads.

    Args:
        config: the checkpoint's ``code_predictor_config``.
        talker_hidden: width of the talker, in which hidden states come and codes are embedded.
    """

    def __init__(self, config: Any, talker_hidden: int) -> None:
        super().__init__()
        self.groups = config.num_code_groups
        self.head_dim = config.head_dim
        self.kv_heads = config.num_key_value_heads
        same = config.hidden_size == talker_hidden
        self.projection = nn.Identity() if same else nn.Linear(talker_hidden, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        shape = (self.groups - 1, config.vocab_size)
        self.heads = nn.Parameter(torch.empty(*shape, config.hidden_size), requires_grad=False)
        self.embeddings = nn.Parameter(torch.empty(*shape, talker_hidden), requires_grad=False)
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, self.head_dim, 2, device="cpu", dtype=torch.float32) / self.head_dim)
        angles = torch.outer(torch.arange(self.groups, device="cpu", dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(self.heads.device), persistent=False)
        self.register_buffer("sin", angles.sin().to(self.heads.device), persistent=False)

    def forward(self, hidden: torch.Tensor, first: torch.Tensor, embedded: torch.Tensor, choose: ChooseCodes) -> Any:
        """The codes of a frame, int64 [n, groups].

        Args:
            hidden: [n, talker hidden].
            first: int64 [n], the first code.
            embedded: [n, talker hidden], its embedding in the talker.
            choose: draws the codes of a group.
        """
        empty = hidden.new_empty(len(hidden), self.kv_heads, 0, self.head_dim)
        cache: Cache = [(empty, empty)] * len(self.layers)
        x = torch.stack([hidden, embedded], dim=1)
        codes = [first]
        for group in range(1, self.groups):
            last, cache = self._advance(self.projection(x), cache)
            code, embedded = choose(last @ self.heads[group - 1].t(), group, self.embeddings[group - 1])
            codes.append(code)
            x = embedded[:, None]
        return torch.stack(codes, dim=1)

    def _advance(self, x: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        """Take one or more positions: the last one's hidden state [n, hidden], and the longer cache."""
        begin = cache[0][0].shape[2]
        cos, sin = (table[begin : begin + x.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        longer = []
        for layer, held in zip(self.layers, cache, strict=True):
            x, held = layer(x, held, cos, sin)
            longer.append(held)
        return self.norm(x[:, -1]), longer


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in which channel i turns with channel i + head_dim / 2."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
