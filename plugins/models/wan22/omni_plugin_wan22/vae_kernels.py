"""Triton kernels for the passes between the VAE's convolutions; ``vae_layers.py`` has what they compute in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 4096
"""That one program reads."""


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
    channels = x.shape[-1]
    for source, target in zip(x, out, strict=True):
        rows = source.numel() // channels
        block = triton.next_power_of_2(channels)
        group = max(1, ELEMENTS // block)
        with torch.cuda.device(x.device):
            _norm_silu[(triton.cdiv(rows, group),)](
                source, gamma if bias is None else bias, gamma, target, rows, channels, epsilon,
                BIASED=bias is not None, ROWS=group, BLOCK=block,
            )  # fmt: skip


def add_(x: torch.Tensor, bias: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``x + bias + other`` in the place of ``x``, both contiguous [..., channels]; ``bias`` is [channels]."""
    elements = x.numel()
    with torch.cuda.device(x.device):
        _add[(triton.cdiv(elements, ELEMENTS),)](x, bias, other, elements, bias.numel(), BLOCK=ELEMENTS)
    return x


@triton.jit
def _norm_silu(
    x, bias, gamma, out, rows, channels, epsilon,
    BIASED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
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
def _add(x, bias, other, elements, channels, BLOCK: tl.constexpr):  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < elements
    value = tl.load(x + place, mask=mask, other=0).to(tl.float32)
    value += tl.load(bias + place % channels, mask=mask, other=0).to(tl.float32)
    value += tl.load(other + place, mask=mask, other=0).to(tl.float32)
    tl.store(x + place, value.to(x.dtype.element_ty), mask=mask)
