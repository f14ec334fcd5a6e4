"""Wan's diffusion transformer on vLLM's parallel layers: a latent video, a timestep and a text in, a velocity out.

    latents --patches--> tokens --[ self-attention, text cross-attention, feed-forward ] x layers--> tokens --> latents

Every block is modulated by the timestep (adaptive layer norm with gates, as in DiT). A video has one timestep, or one
for each of its frames: Wan2.2 TI2V-5B holds a given first frame at 0. The modulation has as many rows as timesteps and
is broadcast over tokens, so that it never takes as much memory or time as the tokens themselves do.

The computation and its dtypes follow ``WanTransformer3DModel`` of diffusers
(``models/transformers/transformer_wan.py``): matrix products in the model's dtype; layer norms, modulation, rotary
embedding and residual gates in float32.

Shapes: B videos, S = frames * rows * columns of patches, G timesteps of a video (1 or its frames), T text tokens,
D = heads * head_dim, H heads of this rank.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from omni_core.diffusion.contract import Attention
from omni_core.errors import ConfigError
from omni_plugin_wan22.ops import GatedAdd, NormRotate, ResidualNorm, rotate

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


@dataclass(frozen=True)
class TransformerConfig:
    """What ``transformer/config.json`` says, with the defaults of diffusers' ``WanTransformer3DModel``."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    eps: float = 1e-6
    rope_max_seq_len: int = 1024

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TransformerConfig:
        """The known keys of ``values``; a list becomes a tuple, and an absent number of output channels the input's."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        known["patch_size"] = tuple(known.get("patch_size", cls.patch_size))
        known["out_channels"] = known.get("out_channels", cls.out_channels) or known.get("in_channels", cls.in_channels)
        return cls(**known)

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


class RotaryEmbedding:
    """Rotary position embedding over time, rows and columns: each axis turns a share of a head's channels.

    A head's channels are divided into ``head_dim - 4 * (head_dim // 6)`` for time and ``2 * (head_dim // 6)`` for each
    of rows and columns; angles are computed in float64, as in the reference (``WanRotaryPosEmbed``). The tables of the
    last few grids are kept.
    """

    KEPT = 4

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        side = 2 * (head_dim // 6)
        self.axis_dims = (head_dim - 2 * side, side, side)
        self.theta = theta
        self._tables: OrderedDict[tuple[Grid, torch.device], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def tables(self, grid: Grid, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [S, 1, head_dim / 2] each, to broadcast over heads."""
        key = (grid, device)
        if key not in self._tables:
            self._tables[key] = self._compute(grid, device)
            if len(self._tables) > self.KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]

    def _compute(self, grid: Grid, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        angles = []
        for axis, (length, dim) in enumerate(zip(grid, self.axis_dims, strict=True)):
            frequencies = self.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            angle = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
            shape = [1, 1, 1, dim // 2]
            shape[axis] = length
            angles.append(angle.view(shape).expand(*grid, -1))
        table = torch.cat(angles, dim=-1).reshape(-1, 1, sum(self.axis_dims) // 2)
        return table.cos().float().to(device), table.sin().float().to(device)


class AffineNorm(nn.Module):
    """Weight and bias of a layer norm, float32 [dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim, dtype=torch.float32), requires_grad=False)


class AcrossHeadsRMSNorm(nn.Module):
    """RMS norm over all heads together, of which this rank holds ``dim / ranks`` channels.

    With one rank it is ``torch.nn.functional.rms_norm``; with several, the mean of squares is summed over ranks.
    """

    def __init__(self, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.ranks = get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.empty(dim // self.ranks, dtype=dtype), requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": sharded_weight_loader(0), "full_shape": (dim,)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, dim / ranks] to the same."""
        if self.ranks == 1:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        wide = x.float()
        squares = tensor_model_parallel_all_reduce(wide.square().sum(dim=-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self.dim + self.eps) * self.weight).type_as(x)


class SelfAttention(nn.Module):
    """Attention of every patch to every patch of its video, with rotary positions."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, attention: Attention) -> None:
        super().__init__()
        dim, self.head_dim, self.attention = config.dim, config.attention_head_dim, attention
        self.to_qkv = QKVParallelLinear(
            dim, self.head_dim, config.num_attention_heads, params_dtype=dtype, return_bias=False
        )
        self.norm_q = AcrossHeadsRMSNorm(dim, config.eps, dtype)
        self.norm_k = AcrossHeadsRMSNorm(dim, config.eps, dtype)
        self.norm_rotate = NormRotate(self.head_dim, config.eps)
        self.to_out = RowParallelLinear(dim, dim, params_dtype=dtype, return_bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``x``: [B, S, D]; ``cos``, ``sin``: [S, 1, head_dim / 2]. Returns [B, S, D]."""
        qkv = self.to_qkv(x)
        if self.norm_q.ranks == 1:
            query, key, value = self.norm_rotate(qkv, self.norm_q.weight, self.norm_k.weight, cos, sin)
        else:
            query, key, value = qkv.chunk(3, dim=-1)
            query = rotate(self.norm_q(query).unflatten(-1, (-1, self.head_dim)), cos, sin)
            key = rotate(self.norm_k(key).unflatten(-1, (-1, self.head_dim)), cos, sin)
            value = value.unflatten(-1, (-1, self.head_dim))
        return self.to_out(self.attention(query, key, value).flatten(2))


class CrossAttention(nn.Module):
    """Attention of every patch to every token of its text (the zeros beyond the text's end included)."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, attention: Attention) -> None:
        super().__init__()
        dim, self.head_dim, self.attention = config.dim, config.attention_head_dim, attention
        self.to_q = ColumnParallelLinear(dim, dim, params_dtype=dtype, return_bias=False)
        self.to_kv = MergedColumnParallelLinear(dim, [dim, dim], params_dtype=dtype, return_bias=False)
        self.norm_q = AcrossHeadsRMSNorm(dim, config.eps, dtype)
        self.norm_k = AcrossHeadsRMSNorm(dim, config.eps, dtype)
        self.to_out = RowParallelLinear(dim, dim, params_dtype=dtype, return_bias=False)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """``x``: [B, S, D]; ``text``: [B, T, D]. Returns [B, S, D]."""
        key, value = self.to_kv(text).chunk(2, dim=-1)
        query = self.norm_q(self.to_q(x)).unflatten(-1, (-1, self.head_dim))
        key = self.norm_k(key).unflatten(-1, (-1, self.head_dim))
        value = value.unflatten(-1, (-1, self.head_dim))
        return self.to_out(self.attention(query, key, value).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with the tanh approximation of GELU between them."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(config.dim, config.ffn_dim, params_dtype=dtype, return_bias=False)
        self.down = RowParallelLinear(config.ffn_dim, config.dim, params_dtype=dtype, return_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activated(x))

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and isinstance(self.up.quant_method, UnquantizedLinearMethod):  # GELU within the matrix product
            up = torch._addmm_activation(self.up.bias, x.flatten(0, 1), self.up.weight.t(), use_gelu=True)
            return up.unflatten(0, x.shape[:2])
        return F.gelu(self.up(x), approximate="tanh")


class Block(nn.Module):
    """One layer: self-attention, cross-attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, attention: Attention) -> None:
        super().__init__()
        self.attn1 = SelfAttention(config, dtype, attention)
        self.norm2 = AffineNorm(config.dim) if config.cross_attn_norm else None
        self.attn2 = CrossAttention(config, dtype, attention)
        self.ffn = FeedForward(config, dtype)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, config.dim, dtype=torch.float32), requires_grad=False)
        self.residual_norm, self.gated_add = ResidualNorm(config.eps), GatedAdd()

    def forward(
        self, x: torch.Tensor, text: torch.Tensor, modulation: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """``x``: [B, S, D]; ``text``: [B, T, D]; ``modulation``: [B, G, 6, D] (shift, scale and gate, twice)."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.scale_shift_table + modulation.float()).split(
            1, dim=2
        )
        _, normed = self.residual_norm(x, None, None, scale, shift, modulation=True)
        attended = self.attn1(normed, cos, sin)
        if self.norm2 is not None:
            x, normed = self.residual_norm(x, attended, gate, self.norm2.weight, self.norm2.bias, modulation=False)
        else:
            x = normed = self.gated_add(x, attended, gate)
        x, normed = self.residual_norm(x, self.attn2(normed, text), None, ffn_scale, ffn_shift, modulation=True)
        return self.gated_add(x, self.ffn(normed), ffn_gate)


class TimeEmbedder(nn.Module):
    """Sinusoids of a timestep through two linear layers, in float32."""

    def __init__(self, freq_dim: int, dim: int) -> None:
        super().__init__()
        self.freq_dim = freq_dim
        self.linear_1 = ReplicatedLinear(freq_dim, dim, params_dtype=torch.float32, return_bias=False)
        self.linear_2 = ReplicatedLinear(dim, dim, params_dtype=torch.float32, return_bias=False)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """[B, G] to float32 [B, G, D]. Frequencies fall from 1 to 1/10000, cosines first."""
        half = self.freq_dim // 2
        exponents = torch.arange(half, dtype=torch.float32, device=timestep.device) / half
        angles = timestep[..., None].float() * torch.exp(-math.log(10000) * exponents)
        return self.linear_2(F.silu(self.linear_1(torch.cat([angles.cos(), angles.sin()], dim=-1))))


class TextEmbedder(nn.Module):
    """The text encoder's width to the transformer's: [B, T, text_dim] to [B, T, D]."""

    def __init__(self, text_dim: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_1 = ReplicatedLinear(text_dim, dim, params_dtype=dtype, return_bias=False)
        self.linear_2 = ReplicatedLinear(dim, dim, params_dtype=dtype, return_bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.gelu(self.linear_1(text), approximate="tanh"))


class ConditionEmbedder(nn.Module):
    """What the blocks are conditioned on: the timestep as modulation, and the text."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.time_embedder = TimeEmbedder(config.freq_dim, config.dim)
        self.time_proj = ReplicatedLinear(config.dim, 6 * config.dim, params_dtype=dtype, return_bias=False)
        self.text_embedder = TextEmbedder(config.text_dim, config.dim, dtype)

    def forward(self, timestep: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns time embedding [B, G, D], modulation of the blocks [B, G, 6, D] and text [B, T, D]."""
        time = self.time_embedder(timestep).type_as(text)
        return time, self.time_proj(F.silu(time)).unflatten(-1, (6, -1)), self.text_embedder(text)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, computed as what it is: one matrix product per patch."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        shape = (config.dim, config.in_channels, *config.patch_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(config.dim, dtype=dtype), requires_grad=False)

    def forward(self, latents: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[B, C, frames, height, width] to [B, S, D]."""
        (frames, rows, columns), (pt, ph, pw) = grid, self.patch_size
        patches = latents.reshape(latents.shape[0], -1, frames, pt, rows, ph, columns, pw)
        patches = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class WanTransformer(nn.Module):
    """One expert of a Wan checkpoint; what it knows of an image is in its latents (Wan 2.2), not in its text (2.1).

    Raises:
        ConfigError: the tensor-parallel size does not divide the heads or the feed-forward's channels.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, attention: Attention) -> None:
        super().__init__()
        _check_tensor_parallel(config)
        self.config, self.dtype = config, dtype
        self.rope = RotaryEmbedding(config.attention_head_dim)
        self.patch_embedding = PatchEmbedding(config, dtype)
        self.condition_embedder = ConditionEmbedder(config, dtype)
        self.blocks = nn.ModuleList(Block(config, dtype, attention) for _ in range(config.num_layers))
        self.norm_out = ResidualNorm(config.eps)
        self.proj_out = ReplicatedLinear(
            config.dim, config.out_channels * math.prod(config.patch_size), params_dtype=dtype, return_bias=False
        )
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, config.dim, dtype=torch.float32), requires_grad=False)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The predicted velocity.

        Args:
            latents: [B, in_channels, frames, height, width] in the model's dtype; sizes are multiples of the patch.
            timestep: [B, 1], of the 1000 that the model was trained on, each video at its own; or [B, frames of
                patches], each frame at its own.
            text: [B, T, text_dim] in the model's dtype.

        Returns:
            [B, out_channels, frames, height, width] in the model's dtype.
        """
        frames, rows, columns = (n // p for n, p in zip(latents.shape[2:], self.config.patch_size, strict=True))
        grid = (frames, rows, columns)
        cos, sin = self.rope.tables(grid, latents.device)
        x = self.patch_embedding(latents, grid)
        time, modulation, text = self.condition_embedder(timestep, text)
        for block in self.blocks:
            x = block(x, text, modulation, cos, sin)
        shift, scale = (self.scale_shift_table + time[:, :, None]).split(1, dim=2)
        _, normed = self.norm_out(x, None, None, scale, shift, modulation=True)
        return self._unpatch(self.proj_out(normed), grid)

    def _unpatch(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[B, S, patch volume * channels] (channels innermost) to [B, channels, frames, height, width]."""
        x = x.unflatten(-1, (*self.config.patch_size, -1)).unflatten(1, grid)
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _check_tensor_parallel(config: TransformerConfig) -> None:
    ranks = get_tensor_model_parallel_world_size()
    for what, number in (("attention heads", config.num_attention_heads), ("feed-forward channels", config.ffn_dim)):
        if number % ranks:
            raise ConfigError(f"a tensor parallel size of {ranks} does not divide the model's {number} {what}")


_RENAMED = ((".attn1.to_out.", ".attn1.to_out.0."), (".attn2.to_out.", ".attn2.to_out.0."),
            (".ffn.up.", ".ffn.net.0.proj."), (".ffn.down.", ".ffn.net.2."))  # fmt: skip


def checkpoint_name(parameter: str, shard: str | int | None) -> str:
    """What diffusers' checkpoint calls a parameter of ``WanTransformer``, or a shard of it."""
    if ".to_qkv." in parameter:
        return parameter.replace(".to_qkv.", f".to_{shard}.")
    if ".to_kv." in parameter:
        return parameter.replace(".to_kv.", f".to_{'kv'[int(shard or 0)]}.")
    for ours, theirs in _RENAMED:
        parameter = parameter.replace(ours, theirs)
    return parameter
