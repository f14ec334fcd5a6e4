"""Triton kernels for the passes between the VAE's convolutions; ``vae_layers.py`` has what they compute in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 4096
"""That one program works on."""


def norm_silu(
    x: torch.Tensor, bias: torch.Tensor | None, gamma: torch.Tensor, epsilon: float, out: torch.Tensor
) -> None:
    """SiLU of the RMS norm of ``x + bias`` over the last dimension, times ``gamma``, into ``out``; float32 inside.

    Args:
        x: contiguous [batch, ..., channels].
        bias: [channels], if there is one.
        gamma: as many elements as channels.
        epsilon: added to the mean square.
        out: of ``x``'s shape; the elements of each batch entry lie together, entries may be apart.
    """
    for source, target in zip(x, out, strict=True):
        rows, channels, grid, sizes = _split(source)
        with torch.cuda.device_of(x):
            _norm_silu[grid](
                source, gamma if bias is None else bias, gamma, target, rows, channels, epsilon,
                BIASED=bias is not None, **sizes,
            )  # fmt: skip


def add_(x: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``x + bias + other`` in the place of ``x``, both contiguous [..., channels]; ``bias`` is [channels]."""
    rows, channels, grid, sizes = _split(x)
    with torch.cuda.device_of(x):
        _add[grid](x, bias, other, rows, channels, **sizes)
    return x


def _split(x: torch.Tensor) -> tuple[int, int, tuple[int], dict[str, int]]:
    """Rows and channels of ``x``, the number of programs, and the rows and columns of each."""
    channels = x.shape[-1]
    rows = x.numel() // channels
    columns = triton.next_power_of_2(channels)
    height = max(1, ELEMENTS // columns)
    return rows, channels, (triton.cdiv(rows, height),), {"HEIGHT": height, "WIDTH": columns}


@triton.jit
def _norm_silu(
    x, bias, gamma, out, rows, channels, epsilon,
    BIASED: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, WIDTH)
    inside = column < channels
    mask = (row < rows)[:, None] & inside[None, :]
    places = row[:, None] * channels + column[None, :]
    value = tl.load(x + places, mask=mask, other=0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + column, mask=inside, other=0).to(tl.float32)[None, :]
    square = tl.sum(value * value, axis=1) / channels
    scale = tl.load(gamma + column, mask=inside, other=0).to(tl.float32)
    value = value * tl.rsqrt(square + epsilon)[:, None] * scale[None, :]
    value = value / (1 + tl.exp(-value))
    tl.store(out + places, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add(x, bias, other, rows, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, WIDTH)
    inside = column < channels
    mask = (row < rows)[:, None] & inside[None, :]
    places = row[:, None] * channels + column[None, :]
    value = tl.load(x + places, mask=mask, other=0).to(tl.float32)
    value += tl.load(bias + column, mask=inside, other=0).to(tl.float32)[None, :]
    value += tl.load(other + places, mask=mask, other=0).to(tl.float32)
    tl.store(x + places, value.to(x.dtype.element_ty), mask=mask)
