"""Launches of ``codec_kernels.py``, with the pool where sessions' pasts are.

``x`` is contiguous [rows, channels] everywhere, as the kernels' module says.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton

from omni_speech_codec import codec_kernels as kernels
from omni_speech_codec.codec_products import LEAST, Product, blocks, tile, unit_blocks
from omni_speech_codec.streaming_layers import ALIGNMENT

LONGEST = 16
"""Frames of a chunk at most: what the rings of attention have room for beside the window."""
HEADS = 8
"""Columns of what the last convolution makes of each position, one for each tap."""
SAMPLES = 256
"""That one program adds up."""
_COMPILING: ContextVar[bool] = ContextVar("compiling", default=False)


@dataclass(frozen=True)
class Where:
    """The sessions of a step.

    Attributes:
        slots: int32 [batch], in the pool.
        positions: int32 [batch], frames that each has behind it.
    """

    slots: torch.Tensor
    positions: torch.Tensor


class Pool:
    """Places for the pasts of sessions. Nothing has to be cleared for a new one: see ``codec_kernels``."""

    def __init__(self) -> None:
        self.size = 0
        self.packed = torch.empty(0)

    def reserve(self, elements: int) -> int:
        """Where a layer's part begins in each slot."""
        begin = self.size
        self.size += math.ceil(elements / ALIGNMENT) * ALIGNMENT
        return begin

    def allocate(self, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """After the last ``reserve``."""
        self.packed = torch.zeros(slots, self.size, dtype=dtype, device=device)


@dataclass(frozen=True)
class Kept:
    """A layer's part of the pool.

    Attributes:
        pool: where it is.
        begin: in each slot.
        reach: positions.
        rate: of them for a frame.
        skipped: of a session's first positions, which count as zero.
    """

    pool: Pool
    begin: int
    reach: int
    rate: int
    skipped: int = 0

    @property
    def tensor(self) -> torch.Tensor:
        """The part of the first slot, and what lies behind it."""
        return self.pool.packed.view(-1)[self.begin :]


def keep(pool: Pool, reach: int, channels: int, rate: int, skipped: int = 0) -> Kept:
    """Room for ``reach`` positions."""
    return Kept(pool, pool.reserve(reach * channels), reach, rate, skipped)


def multiply(
    product: Product,
    x: torch.Tensor,
    *,
    kept: Kept | None = None,
    where: Where | None = None,
    residual: torch.Tensor | None = None,
    gelu: bool = False,
    raw: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product with ``x``, with ``residual`` added, before and after the activation.

    Args:
        product: with a past if ``kept`` and ``where`` are given, which has to be carried on afterwards.
        x: the input.
        kept, where: of it.
        residual: [rows, columns].
        gelu: the activation, for a product without a snake.
        raw: whether the first of the results is wanted; it is something else otherwise.

    Returns:
        Twice the same where there is no activation.
    """
    rows, some = len(x), product.weight  # ``some`` stands for what there is not
    activation = kernels.GATED if product.gated else kernels.GELU if gelu else kernels.NONE
    if product.turns is not None:
        activation = kernels.SNAKE
    active = activation is kernels.SNAKE or activation is kernels.GELU
    before = x.new_empty(rows, product.columns) if raw else x
    after = x.new_empty(rows, product.columns) if active else before
    sizes = blocks(rows, product)
    step = sizes["BLOCK_N"] + (0 if product.gated else sizes["SECOND_N"])
    stateful = kept is not None and where is not None
    _launch(
        kernels.product_kernel, (-(-rows // sizes["BLOCK_M"]) * -(-product.columns // step),),
        x, kept.tensor if stateful else some, product.weight, _or(product.bias, some), _or(residual, some),
        _or(product.scale, some), _or(product.turns, some), _or(product.strength, some), before, after,
        where.slots if stateful else some, where.positions if stateful else some,
        rows, rows // len(where.slots) if stateful else rows, kept.rate if stateful else 1,
        kept.skipped if stateful else 0, product.dilation, kept.pool.size if stateful else ALIGNMENT,
        product.columns, product.weight.shape[1],
        CHANNELS=product.channels, PADDED=product.padded, TAPS=product.taps,
        ACTIVATION=activation, BIASED=product.bias is not None, ADDED=residual is not None,
        SCALED=product.scale is not None, RAW=raw, PRECISION=_precision(), **sizes,
    )  # fmt: skip
    return before, after


def convolve(
    product: Product, kept: Kept, x: torch.Tensor, where: Where, *, raw: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """``multiply`` over time, whose past it carries on."""
    results = multiply(product, x, kept=kept, where=where, raw=raw)
    carry(x, kept, where)
    return results


def residual_unit(
    inner: Product,
    outer: Product,
    kept: Kept,
    x: torch.Tensor,
    residual: torch.Tensor,
    where: Where,
    *,
    raw: bool = True,
    head: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual unit in one kernel, from after its first snake to after the snake that comes next.

    Args:
        inner: the dilated convolution with its snake, of which one tile has all columns.
        outer: the pointwise one with the next snake; its weight is square.
        kept, where: of the convolution.
        x, residual: the unit's input after its first snake and before.
        raw: whether the sum before the next snake is wanted; the first result is something else otherwise.
        head: [width, 16]; the second result is then the product with it, float32 [rows, 8].
    """
    rows = len(x)
    total = torch.empty_like(x) if raw else x
    out = torch.empty_like(x) if head is None else torch.empty(rows, HEADS, dtype=torch.float32, device=x.device)
    sizes = unit_blocks(rows, inner)
    _launch(
        kernels.unit_kernel, (-(-rows // sizes["BLOCK_M"]),),
        x, kept.tensor, inner.weight, inner.bias, inner.turns, inner.strength, outer.weight, outer.bias, residual,
        outer.turns, outer.strength, total, out, _or(head, x), out, where.slots, where.positions,
        rows, rows // len(where.slots), kept.rate, kept.skipped, inner.dilation, kept.pool.size,
        CHANNELS=inner.channels, PADDED=inner.padded, TAPS=inner.taps,
        RAW=raw, HEAD=head is not None, PRECISION=_precision(), **sizes,
    )  # fmt: skip
    carry(x, kept, where)
    return total, out


def samples(heads: torch.Tensor, bias: torch.Tensor, taps: int, kept: Kept, where: Where, out: torch.Tensor) -> None:
    """What ``residual_unit`` made with a head, to ``out`` float32 [rows] in [-1, 1]; ``kept`` is float32 too."""
    rows = len(heads)
    _launch(
        kernels.samples_kernel, (-(-rows // SAMPLES),),
        heads, kept.tensor, bias, out, where.slots, where.positions, rows, rows // len(where.slots), kept.rate,
        kept.skipped, kept.pool.size, TAPS=taps, BLOCK=SAMPLES,
    )  # fmt: skip
    carry(heads, kept, where)


def carry(x: torch.Tensor, kept: Kept, where: Where) -> None:
    """The last positions of ``x`` become the past, when all that needs the earlier one has run."""
    if not kept.reach:
        return
    batch, channels = len(where.slots), x.shape[1]
    block_c = min(64, tile(LEAST, channels))
    _launch(
        kernels.carry_kernel, (batch, -(-channels // block_c)),
        x, kept.tensor, where.slots, where.positions, len(x) // batch, kept.rate, kept.skipped, kept.pool.size,
        channels, kept.reach, BLOCK_R=tile(1, kept.reach), BLOCK_C=block_c,
    )  # fmt: skip


def depthwise_norm(
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    kept: Kept,
    x: torch.Tensor,
    where: Where,
) -> torch.Tensor:
    """A depthwise convolution and a layer norm over the channels; weights float32, the first [taps, channels]."""
    rows, channels = x.shape
    out = torch.empty_like(x)
    _launch(
        kernels.depthwise_norm_kernel, (rows,),
        x, kept.tensor, weight, bias, norm_weight, norm_bias, out, where.slots, where.positions,
        rows // len(where.slots), kept.rate, kept.pool.size, channels, eps, TAPS=len(weight),
        BLOCK=tile(LEAST, channels),
    )  # fmt: skip
    carry(x, kept, where)
    return out


def rms_norm(weight: torch.Tensor, eps: float, x: torch.Tensor) -> torch.Tensor:
    """Over the channels; the weight is float32."""
    out = torch.empty_like(x)
    _launch(kernels.rms_norm_kernel, (len(x),), x, weight, out, x.shape[1], eps, BLOCK=tile(LEAST, x.shape[1]))
    return out


def entries(codes: torch.Tensor, table: torch.Tensor, size: int, leading: int, scale: float = 1.0) -> torch.Tensor:
    """The sum of the entries of the first ``leading`` groups, then that of the others if there are any, scaled.

    Args:
        codes: int32 [batch, frames, groups].
        table: [groups * size, width].
        size: of a group's codebook.
        leading: groups.
        scale: of the sums.

    Returns:
        [rows, width], or [rows, 2 * width].
    """
    rows, groups, width = codes.shape[0] * codes.shape[1], codes.shape[2], table.shape[1]
    out = table.new_empty(rows, width if leading == groups else 2 * width)
    _launch(
        kernels.entries_kernel, (rows,),
        codes, table, out, size, width, scale, GROUPS=groups, LEADING=leading, BLOCK=tile(LEAST, width),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Rings:
    """A layer's keys and values in the pool, and the sizes of its attention.

    Attributes:
        kept: where they are; ``reach`` is the length of a ring.
        heads, kv_heads, width: of attention.
        window: keys that a query sees, its own included.
    """

    kept: Kept
    heads: int
    kv_heads: int
    width: int
    window: int


def rings(pool: Pool, heads: int, kv_heads: int, width: int, window: int) -> Rings:
    """Room for a window and a chunk."""
    length = window - 1 + LONGEST
    return Rings(keep(pool, length, 2 * kv_heads * width, 1), heads, kv_heads, width, window)


def attention(past: Rings, frequencies: torch.Tensor, qkv: torch.Tensor, where: Where) -> torch.Tensor:
    """[rows, (heads + 2 kv_heads) * width] to [rows, heads * width]; frequencies are float32 [width / 2]."""
    batch = len(where.slots)
    out = qkv.new_empty(len(qkv), past.heads * past.width)
    _launch(
        kernels.attention_kernel, (batch, past.heads),
        qkv, past.kept.tensor, frequencies, out, where.slots, where.positions, len(qkv) // batch, past.kept.pool.size,
        HEADS=past.heads, KV_HEADS=past.kv_heads, WIDTH=past.width, WINDOW=past.window, RING=past.kept.reach,
        BLOCK_Q=LONGEST, BLOCK_P=tile(LEAST, past.window - 1), PRECISION=_precision(),
    )  # fmt: skip
    return out


@contextmanager
def compiling() -> Iterator[None]:
    """Within it kernels are compiled, all at once, and not launched; results are whatever the memory holds."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as executor, triton.AsyncCompileMode(executor):
        token = _COMPILING.set(True)
        try:
            yield
        finally:
            _COMPILING.reset(token)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    if _COMPILING.get():
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


def _precision() -> str:
    """Of products of float32: three of TF32 are as near as one of float32, and faster."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor
