"""The decoder of ``codec_network.py`` on CUDA: the same weights and results, in Triton kernels and 16 bits.

Activations are channels last, so that a convolution over time is a product (``codec_products.py``). Every snake is
computed where the positions that it is applied to are written, and once. Residual units of few channels are one kernel.
What layers need of earlier positions stays in one pool, in the slot of each session, and nothing is stacked or copied
back: kernels find it by the slots and positions that they are given, so that a recorded graph serves any sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from omni_speech_codec import fused_ops as ops
from omni_speech_codec.codec_network import CodecNetwork, PreTransformer
from omni_speech_codec.codec_products import LEAST, Product, convolution, linear, tile, transposed
from omni_speech_codec.fused_ops import HEADS, Kept, Pool, Where
from omni_speech_codec.streaming_layers import (
    CausalConv,
    ConvNeXt,
    SlidingLayer,
    Snake,
    SnakeUpsampling,
    StatefulLayer,
)

WIDEST_UNIT = 128
"""Channels of a residual unit that is one kernel."""


class FusedNetwork:
    """A ``CodecNetwork`` with the pasts of ``slots`` sessions.

    Args:
        network: float32, whose weights are copied.
        dtype: of weights, activations and pasts.
        slots: how many; the caller says which are whose.
        widest_unit: channels of residual units that are one kernel, a power of two.

    Raises:
        ValueError: the last residual units have more channels than that, or the last convolution too many taps.
    """

    def __init__(
        self, network: CodecNetwork, dtype: torch.dtype, slots: int, *, widest_unit: int = WIDEST_UNIT
    ) -> None:
        self.dtype, self.groups, self.codebook_size = dtype, network.groups, network.codebook_size
        self.samples_per_frame, self.skipped = network.samples_per_frame, network.skipped
        self.device = network.pre_transformer.norm.weight.device
        self.pool = Pool()
        self._dequantize, pre_conv = network.dequantizer.fused(dtype), network.pre_conv
        self._pre_conv = (
            None if pre_conv is None else _Convolution.of(pre_conv, convolution(pre_conv, dtype), self.pool)
        )
        self._transformer = _Transformer(network.pre_transformer, dtype, self.pool)
        self._upsample: list[tuple[_Convolution, _ConvNeXt]] = []
        for layer, block in network.upsample:
            up = _Convolution.of(layer, transposed(layer, dtype), self.pool)
            self._upsample.append((up, _ConvNeXt(block, dtype, self.pool)))
        first, *blocks, snake, last = network.decoder
        snakes = [block.block[0] for block in blocks] + [snake]
        self._first = _Convolution.of(first, convolution(first, dtype).followed_by(snakes[0]), self.pool)
        self.blocks: list[_Block] = []
        for block, following in zip(blocks, snakes[1:], strict=True):
            self.blocks.append(_Block(block, following, dtype, self.pool, widest_unit))
        self._last = _Last(last, dtype, slots)
        self.blocks[-1].units[-1] = replace(self.blocks[-1].units[-1], head=self._last.head)
        if not self.blocks[-1].units[-1].fused:
            raise ValueError(f"{last.conv.in_channels} channels come out of the last block; {widest_unit} fit")
        self.pool.allocate(slots, dtype, self.device)

    def __call__(self, codes: torch.Tensor, where: Where, out: torch.Tensor) -> None:
        """Take every session one chunk further.

        Args:
            codes: int32 [batch, frames, groups], each below ``codebook_size``; at most ``fused_ops.LONGEST`` frames.
            where: the sessions.
            out: float32 [batch, frames * samples_per_frame], for the samples, in [-1, 1].
        """
        x = self.first(self.upsample(self.front(codes, where), where), where)
        for block in self.blocks:
            x = block(x, where)
        self.samples(x, where, out)

    def front(self, codes: torch.Tensor, where: Where) -> torch.Tensor:
        """The stages at frame rate: [rows, latent]."""
        x = self._dequantize(codes)
        if self._pre_conv is not None:
            x, _ = self._pre_conv(x, where)
        return self._transformer(x, where)

    def upsample(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        """[rows, latent] to the same for each of the upsampled positions."""
        channels = x.shape[1]
        for up, block in self._upsample:
            x, _ = up(x, where)
            x = block(x.view(-1, channels), where)
        return x

    def first(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        """The decoder's first convolution, and the snake that its first block begins with."""
        return self._first(x, where, raw=False)[1]

    def samples(self, heads: torch.Tensor, where: Where, out: torch.Tensor) -> None:
        """The last convolution, of what the last block gives."""
        ops.samples(heads, self._last.bias, self._last.taps, self._last.kept, where, out)


@dataclass(frozen=True)
class _Convolution:
    """A product over time, and its past."""

    product: Product
    kept: Kept

    @classmethod
    def of(cls, layer: StatefulLayer, product: Product, pool: Pool) -> _Convolution:
        return cls(product, ops.keep(pool, product.reach, product.channels, layer.rate, layer.skipped))

    def __call__(self, x: torch.Tensor, where: Where, *, raw: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.convolve(self.product, self.kept, x, where, raw=raw)


class _Transformer:
    """``PreTransformer``: [rows, latent] to the same."""

    def __init__(self, network: PreTransformer, dtype: torch.dtype, pool: Pool) -> None:
        exponents = torch.arange(0, network.head_dim, 2, dtype=torch.float32) / network.head_dim
        self._frequencies = (1.0 / network.theta**exponents).to(network.norm.weight.device)
        ends = network.input_proj, network.output_proj
        self._inputs, self._outputs = (None if layer is None else linear(layer, dtype) for layer in ends)
        self._layers = [_Layer(layer, dtype, pool, network.window) for layer in network.layers]
        self._norm, self._eps = network.norm.weight.float(), network.norm.eps

    def __call__(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        if self._inputs is not None:
            x, _ = ops.multiply(self._inputs, x)
        for layer in self._layers:
            x = layer(x, self._frequencies, where)
        x = ops.rms_norm(self._norm, self._eps, x)
        return x if self._outputs is None else ops.multiply(self._outputs, x)[0]


class _Layer:
    """``SlidingLayer``: [rows, hidden] to the same."""

    def __init__(self, layer: SlidingLayer, dtype: torch.dtype, pool: Pool, window: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._rings = ops.rings(pool, attention.heads, attention.kv_heads, attention.head_dim, window)
        self._qkv = linear(attention.qkv_proj, dtype)
        self._o = linear(attention.o_proj, dtype).scaled(layer.self_attn_layer_scale.scale)
        self._gate_up = linear(mlp.gate_up_proj, dtype, gated=True)
        self._down = linear(mlp.down_proj, dtype).scaled(layer.mlp_layer_scale.scale)
        norms = layer.input_layernorm, layer.post_attention_layernorm
        self._norms = [(norm.weight.float(), norm.eps) for norm in norms]

    def __call__(self, x: torch.Tensor, frequencies: torch.Tensor, where: Where) -> torch.Tensor:
        y, _ = ops.multiply(self._qkv, ops.rms_norm(*self._norms[0], x))
        x, _ = ops.multiply(self._o, ops.attention(self._rings, frequencies, y, where), residual=x)
        y, _ = ops.multiply(self._gate_up, ops.rms_norm(*self._norms[1], x))
        return ops.multiply(self._down, y, residual=x)[0]


class _ConvNeXt:
    """``ConvNeXt``: [rows, channels] to the same."""

    def __init__(self, block: ConvNeXt, dtype: torch.dtype, pool: Pool) -> None:
        conv, norm = block.dwconv.conv, block.norm
        self._depthwise = conv.weight[:, 0].T.float().contiguous(), conv.bias.float()
        self._norm = norm.weight.float(), norm.bias.float(), norm.eps
        channels, reach = block.dwconv.past_shape
        self._kept = ops.keep(pool, reach, channels, block.dwconv.rate)
        self._up = linear(block.pwconv1, dtype)
        self._down = linear(block.pwconv2, dtype).scaled(block.gamma)

    def __call__(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        y = ops.depthwise_norm(*self._depthwise, *self._norm, self._kept, x, where)
        _, y = ops.multiply(self._up, y, gelu=True, raw=False)
        return ops.multiply(self._down, y, residual=x)[0]


@dataclass(frozen=True)
class _Unit:
    """``SnakeResidual``: the dilated convolution with its snake, and the pointwise one with the snake that is next.

    Attributes:
        head: of the last convolution, for the last unit of all.
    """

    conv: _Convolution
    pointwise: Product
    fused: bool
    head: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, where: Where, *, raw: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fused:
            return ops.residual_unit(
                self.conv.product, self.pointwise, self.conv.kept, x, residual, where, raw=raw, head=self.head
            )
        _, y = self.conv(x, where, raw=False)
        return ops.multiply(self.pointwise, y, residual=residual, raw=raw)


class _Block:
    """``SnakeUpsampling`` from after its snake to after the snake that comes next."""

    def __init__(
        self, block: SnakeUpsampling, following: Snake, dtype: torch.dtype, pool: Pool, widest_unit: int
    ) -> None:
        _, up, *units = block.block
        snakes = [unit.act1 for unit in units] + [following]
        self._up = _Convolution.of(up, transposed(up, dtype).followed_by(snakes[0]), pool)
        self.units: list[_Unit] = []
        for unit, snake in zip(units, snakes[1:], strict=True):
            inner = convolution(unit.conv1, dtype).followed_by(unit.act2)
            outer = convolution(unit.conv2, dtype).followed_by(snake)
            width = outer.weight.shape[1]
            fused = width <= widest_unit
            if fused:
                outer = replace(outer, weight=_padded(outer.weight, width))
            self.units.append(_Unit(_Convolution.of(unit.conv1, inner, pool), outer, fused))

    def __call__(self, x: torch.Tensor, where: Where) -> torch.Tensor:
        raw, x = self._up(x, where)
        channels = self.units[0].conv.product.channels
        raw, x = raw.view(-1, channels), x.view(-1, channels)
        for unit in self.units:
            raw, x = unit(x, raw, where, raw=unit is not self.units[-1])
        return x


class _Last:
    """The convolution to one channel, as a product with ``head`` that gives each tap a column."""

    def __init__(self, layer: CausalConv, dtype: torch.dtype, slots: int) -> None:
        weight = layer.conv.weight[0]  # [channels, taps]
        self.taps = weight.shape[1]
        if self.taps > HEADS:
            raise ValueError(f"the last convolution has {self.taps} taps; {HEADS} fit")
        self.head = weight.new_zeros(tile(LEAST, len(weight)), LEAST, dtype=dtype)  # as high as a unit is wide, or more
        self.head[: len(weight), : self.taps] = weight
        self.bias = layer.conv.bias.float()
        pool = Pool()  # of float32
        self.kept = ops.keep(pool, self.taps - 1, HEADS, layer.rate, layer.skipped)
        pool.allocate(slots, torch.float32, weight.device)


def _padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    full = weight.new_zeros(rows, weight.shape[1])
    full[: len(weight)] = weight
    return full
