"""Layers of causal networks that run chunk by chunk, each session with a past of its own.

A layer that looks back says how much of its input it needs again (``past_shape``). ``PastLayout`` puts the pasts of all
layers of a network into one flat tensor, so that a session's state is a single tensor of constant size and a batch of
sessions is a stack of them. ``Past`` is such a batch during a step: layers read their part, and overwrite it with what
they will need next. A past of zeros is the beginning of a stream: it is what causal convolutions pad with, and
attention masks it.

No layer looks across rows, and no shape depends on how far a session has come. A step of ``[batch, chunk]`` is a fixed
sequence of kernels, which a CUDA graph can record.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

ALIGNMENT = 64
"""Of each layer's part of the flat tensor, in elements, so that kernels can copy whole words."""


class StatefulLayer(nn.Module):
    """A layer that looks back.

    Attributes:
        past_shape: of what it keeps of one session; with a zero in it where it keeps nothing.
        rate: positions of its input for one of attention.
        skipped: how many of its input, from a session's first on, count as zero like those before.
    """

    past_shape: tuple[int, ...]
    rate: int = 1
    skipped: int = 0


class PastLayout:
    """Where the layers of a network keep their pasts within a flat tensor of ``size`` elements per session."""

    def __init__(self, network: nn.Module) -> None:
        self._begin: dict[StatefulLayer, int] = {}
        self.size = 0
        for layer in network.modules():
            if isinstance(layer, StatefulLayer):
                self._begin[layer] = self.size
                self.size += math.ceil(math.prod(layer.past_shape) / ALIGNMENT) * ALIGNMENT

    def view(self, layer: StatefulLayer, packed: torch.Tensor) -> torch.Tensor:
        """The part of ``layer`` in ``packed`` [batch, size]: [batch, *past_shape], to read and to overwrite."""
        begin = self._begin[layer]
        part = packed[:, begin : begin + math.prod(layer.past_shape)]
        return part.unflatten(1, layer.past_shape)


class Past:
    """What a batch of sessions has behind it, during one step.

    Args:
        layout: of the network that runs.
        packed: [batch, layout.size], overwritten by the step.
        positions: int64 [batch], how many positions of attention each session has behind it.
    """

    def __init__(self, layout: PastLayout, packed: torch.Tensor, positions: torch.Tensor) -> None:
        self.positions = positions
        self._layout, self._packed = layout, packed

    def of(self, layer: StatefulLayer) -> torch.Tensor:
        """[batch, *past_shape], to read and to overwrite."""
        return self._layout.view(layer, self._packed)

    def extend(self, layer: StatefulLayer, x: torch.Tensor) -> torch.Tensor:
        """``x`` [batch, channels, chunk] behind the layer's last inputs, whose place its own last ones take."""
        count = layer.past_shape[-1]
        if count == 0:
            return x
        if layer.skipped:
            at = self.positions[:, None] * layer.rate + torch.arange(x.shape[2], device=x.device)
            x = x.masked_fill((at < layer.skipped)[:, None], 0)
        kept = self.of(layer)
        joined = torch.cat((kept, x), dim=2)
        kept.copy_(joined[..., -count:])
        return joined


class CausalConv(StatefulLayer):
    """A convolution over time, of stride 1, that sees no later input: [batch, inputs, chunk] to as many positions."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, dilation=dilation, groups=groups)
        self.past_shape = (inputs, (kernel - 1) * dilation)

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        return self.conv(past.extend(self, x))


class CausalTransposedConv(StatefulLayer):
    """A transposed convolution without its last ``kernel - stride`` outputs: ``stride`` outputs for each input.

    Where a network is without the first ``kernel - stride`` too, they are outputs like others here, which the layers
    behind skip.

    Outputs overlap where the kernel is longer than the stride. The inputs that reach into the chunk are kept and
    convolved again, and not their outputs: they are fewer numbers, and sums have the order that they have in one go.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, kernel, stride)
        self.stride = stride
        self.past_shape = (inputs, (kernel - 1) // stride)

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        begin, length = self.past_shape[1] * self.stride, x.shape[2] * self.stride
        return self.conv(past.extend(self, x))[..., begin : begin + length]


class Snake(nn.Module):
    """``x + strength * sin(frequency * x)^2`` per channel (Liu Ziyin et al., 2020; SnakeBeta of BigVGAN).

    Checkpoints store logarithms; ``from_logarithms`` says what these parameters are then.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(channels))
        self.strength = nn.Parameter(torch.ones(channels))

    @staticmethod
    def from_logarithms(alpha: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``frequency = exp(alpha)`` and ``strength = 1 / (exp(beta) + 1e-9)``."""
        return alpha.exp(), 1.0 / (beta.exp() + 1e-9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = (x * self.frequency[:, None]).sin_().square_()
        return torch.addcmul(x, squares, self.strength[:, None])


class ConvNeXt(nn.Module):
    """A causal ConvNeXt block: depthwise over 7 positions, then pointwise through four times as many channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        y = self.norm(self.dwconv(x, past).transpose(1, 2))
        y = self.pwconv2(F.gelu(self.pwconv1(y)))
        return torch.addcmul(x, y.transpose(1, 2), self.gamma[:, None])


class SnakeResidual(nn.Module):
    """Snake, a dilated causal convolution over 7 positions, snake, a pointwise one, and the input added."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = Snake(channels)
        self.conv1 = CausalConv(channels, channels, 7, dilation=dilation)
        self.act2 = Snake(channels)
        self.conv2 = CausalConv(channels, channels, 1)

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        return self.conv2(self.act2(self.conv1(self.act1(x), past)), past) + x


class SnakeUpsampling(nn.Module):
    """Snake, a transposed convolution over two strides, and residual units of growing dilation."""

    def __init__(self, inputs: int, outputs: int, rate: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        units = [SnakeResidual(outputs, dilation) for dilation in dilations]
        self.block = nn.ModuleList([Snake(inputs), CausalTransposedConv(inputs, outputs, 2 * rate, rate), *units])

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        snake, *rest = self.block
        x = snake(x)
        for layer in rest:
            x = layer(x, past)
        return x


class AttentionContext:
    """What all layers of sliding attention share in a step: rotations and the mask.

    Args:
        past: of the step.
        chunk: positions in it.
        window: how many positions a query sees, itself included.
        head_dim, theta: of the rotary embedding.
        dtype: of queries and keys.
    """

    def __init__(self, past: Past, chunk: int, window: int, head_dim: int, theta: float, dtype: torch.dtype) -> None:
        device = past.positions.device
        queries = torch.arange(chunk, device=device)
        keys = torch.arange(1 - window, chunk, device=device)
        back = queries[:, None] - keys
        begun = keys >= -past.positions[:, None]
        self.mask = (((back >= 0) & (back < window)) & begun[:, None])[:, None]
        """Boolean [batch, 1, chunk, window - 1 + chunk]: the keys are the past's, then the chunk's."""
        exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        angles = (past.positions[:, None] + queries).float()[..., None] * (1.0 / theta**exponents)
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1)[:, :, None].to(dtype)
        self.sin = torch.cat((-sin, sin), dim=-1)[:, :, None].to(dtype)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate halves of each head of [batch, chunk, heads, head_dim] against each other (GPT-NeoX's order)."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class SlidingAttention(StatefulLayer):
    """Causal attention of which every query sees ``window`` keys, its own included. Keys are kept rotated."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, window: int, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.past_shape = (2, kv_heads, window - 1, head_dim)
        self.qkv_proj = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(self, x: torch.Tensor, context: AttentionContext, past: Past) -> torch.Tensor:
        qkv = self.qkv_proj(x).unflatten(2, (-1, self.head_dim))
        qk = context.rotate(qkv[:, :, : self.heads + self.kv_heads]).transpose(1, 2)
        kept = past.of(self)
        before, chunk = self.past_shape[2], x.shape[1]
        seen = x.new_empty(x.shape[0], 2, self.kv_heads, before + chunk, self.head_dim)
        seen[..., :before, :] = kept
        seen[:, 0, :, before:] = qk[:, self.heads :]
        seen[:, 1, :, before:] = qkv[:, :, self.heads + self.kv_heads :].transpose(1, 2)
        kept.copy_(seen[..., chunk:, :])
        keys, values = seen.unbind(1)
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(
            qk[:, : self.heads], keys, values, attn_mask=context.mask, enable_gqa=grouped
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``; gate and up are one matrix."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class LayerScale(nn.Module):
    """Adds what a branch gives, times a number per channel, to what went into it (Touvron et al., 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x, branch, self.scale)


class RMSNorm(nn.Module):
    """Root mean square norm; the mean is float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SlidingLayer(nn.Module):
    """Attention and a gated MLP, each after a norm and within a scaled residual."""

    def __init__(self, attention: SlidingAttention, width: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = GatedMLP(width, intermediate)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = LayerScale(width), LayerScale(width)

    def forward(self, x: torch.Tensor, context: AttentionContext, past: Past) -> torch.Tensor:
        x = self.self_attn_layer_scale(x, self.self_attn(self.input_layernorm(x), context, past))
        return self.mlp_layer_scale(x, self.mlp(self.post_attention_layernorm(x)))
