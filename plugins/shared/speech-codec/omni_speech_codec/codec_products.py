"""Weights of the codec's decoder as the kernels multiply with them, and the tiles that they are multiplied in.

Everything that is linear over channels is one product: a causal convolution of ``taps`` positions, ``dilation`` apart,
has the columns [taps * channels] as input; a transposed one of stride s is a convolution with s times as many channels
out, of which each run of ``channels`` is a position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from omni_speech_codec.streaming_layers import CausalConv, CausalTransposedConv, Snake

LEAST = 16
"""Rows and columns of the smallest tile that tensor cores take."""
TWO_AT_A_TIME = 128
"""Registers of a thread with which a multiprocessor runs two programs of 8 warps: one multiplies while the other
stores."""
WAVE = 100
"""Programs that are worth being large: a GPU has some 130 multiprocessors."""


@dataclass(frozen=True)
class Product:
    """A weight, and what follows the product with it.

    Attributes:
        weight: [taps * padded, columns and more], the more being zero.
        columns: that come out.
        channels: that come in, of each tap; ``padded`` to what a tile can be.
        taps, dilation: positions that one output is made of, the last its own.
        gated: the weight has the columns twice, and SiLU of the first ones is a factor of the second.
        bias, scale: float32, as wide as the weight.
        turns, strength: of a snake afterwards, likewise; the frequency is divided by pi.
    """

    weight: torch.Tensor
    columns: int
    channels: int
    padded: int
    taps: int = 1
    dilation: int = 1
    gated: bool = False
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    turns: torch.Tensor | None = None
    strength: torch.Tensor | None = None

    @property
    def reach(self) -> int:
        """Positions before the chunk that it needs."""
        return (self.taps - 1) * self.dilation

    def followed_by(self, snake: Snake) -> Product:
        """The same with a snake of its columns, or of each run of them."""
        return replace(self, turns=self._repeated(snake.frequency / torch.pi), strength=self._repeated(snake.strength))

    def scaled(self, scale: torch.Tensor) -> Product:
        """The same with a factor per column."""
        return replace(self, scale=self._repeated(scale))

    def _repeated(self, values: torch.Tensor) -> torch.Tensor:
        return _wide(values.repeat(self.columns // len(values)), self.weight.shape[1])


def linear(layer: nn.Linear | torch.Tensor, dtype: torch.dtype, *, gated: bool = False) -> Product:
    """Of a linear layer, or a weight [outputs, inputs] without bias."""
    weight, bias = (layer, None) if isinstance(layer, torch.Tensor) else (layer.weight, layer.bias)
    return _product(weight.T[None], bias, dtype, gated=gated)


def convolution(layer: CausalConv, dtype: torch.dtype) -> Product:
    """Of a convolution that is not depthwise."""
    conv = layer.conv
    return _product(conv.weight.permute(2, 1, 0), conv.bias, dtype, dilation=conv.dilation[0])


def transposed(layer: CausalTransposedConv, dtype: torch.dtype) -> Product:
    """Of a transposed convolution whose kernel is a multiple of its stride.

    Position ``p`` of those that input ``t`` begins has ``weight[:, :, p + j * stride]`` of input ``t - j``.
    """
    weight = layer.conv.weight.unflatten(2, (-1, layer.stride)).flip(2)  # [inputs, outputs, taps, stride]
    return _product(weight.permute(2, 0, 3, 1).flatten(2), layer.conv.bias.repeat(layer.stride), dtype)


def tile(least: int, size: int) -> int:
    """The power of two, ``least`` or more, that ``size`` fits into."""
    return max(least, 1 << (size - 1).bit_length())


def blocks(rows: int, product: Product) -> dict[str, int | None]:
    """Tile sizes, warps and stages of a product: large ones where there are enough of them to occupy a GPU."""
    columns, width, small = product.columns, product.weight.shape[1], product.weight.element_size() < 4
    split = columns % 192 == 0 and columns % 128 != 0
    n = 128 + 64 * split
    if not product.gated and width >= n and -(-rows // 128) * (width // n) >= WAVE:
        size, second, warps, stages, depth = (128, 128), 64 * split, 8, 3, 64
        if split and product.taps == 1:  # little to multiply: two smaller programs at a time hide each other's stores
            size, warps = (64, 128), 4
    elif rows > 64:
        size, second, warps, stages, depth = (64, 64), 0, 4, 4, 64
    else:
        size, second, warps, stages, depth = (tile(LEAST, rows), 32), 0, 4, 4, 128
    block_n = next(n for n in (128, 64, 32, 16) if n <= size[1] and width % (n + second) == 0)
    if product.gated:
        second = block_n
    depth = depth if small else depth // 2
    block_k = next(k for k in (depth, depth // 2, depth // 4, depth // 8) if product.padded % k == 0 and k <= depth)
    return {
        "BLOCK_M": size[0], "BLOCK_N": block_n, "SECOND_N": second, "BLOCK_K": block_k,
        "num_warps": warps, "num_stages": stages,
        "maxnreg": TWO_AT_A_TIME if warps == 8 and not second and small else None,
    }  # fmt: skip


def unit_blocks(rows: int, product: Product) -> dict[str, int | None]:
    """The same of a residual unit, whose columns are one tile."""
    small, width = product.weight.element_size() < 4, product.weight.shape[1]
    block_k = next(k for k in (64, 32, 16) if product.padded % k == 0)
    second = width // 3 if width % 96 == 0 else 0
    large = -(-rows // 128) >= WAVE and width <= 128
    return {
        "BLOCK_M": 128 if large else 64, "BLOCK_N": width - second, "SECOND_N": second,
        "BLOCK_K": block_k if small else 16, "num_warps": 8 if large else 4, "num_stages": 4 if width <= 128 else 3,
        "maxnreg": TWO_AT_A_TIME if large and small else None,
    }  # fmt: skip


def _product(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    dilation: int = 1,
    gated: bool = False,
) -> Product:
    """Of [taps, channels, columns], and a bias [columns]."""
    taps, channels, columns = weight.shape
    columns = columns // 2 if gated else columns
    padded = -(-channels // LEAST) * LEAST
    width = _width(columns) + columns * gated
    full = weight.new_zeros(taps, padded, width, dtype=dtype)
    full[:, :channels, : weight.shape[2]] = weight
    return Product(
        full.flatten(0, 1), columns, channels, padded, taps, dilation, gated,
        None if bias is None else _wide(bias, width),
    )  # fmt: skip


def _width(columns: int) -> int:
    """Columns as tiles cover them; see ``blocks``."""
    if columns % 192 == 0 or columns == 96:
        return columns
    return tile(LEAST, columns) if columns <= 128 else -(-columns // 128) * 128


def _wide(values: torch.Tensor, width: int) -> torch.Tensor:
    full = values.new_zeros(width, dtype=torch.float32)
    full[: len(values)] = values
    return full
