# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
"""Triton kernels for the memory-bound parts of a block: one reading and one writing of a token's row each.

They compute in float32 and round to the dtype of the tokens where the PyTorch form in ``ops.py`` rounds.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

WARPS = 8


def residual_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + branch * gate``, and its layer norm times ``offset + scale`` plus ``shift``.

    Args:
        x: [B, S, D], contiguous, like ``branch``.
        branch: what is added to the residual stream, or ``None``.
        gate: float32 [B, G, 1, D], one row for each run of S / G tokens, or ``None`` for 1.
        scale: like ``gate``, or [D] for all tokens; ``shift`` likewise.
        eps: added to the variance.
        offset: 1 for a modulation, 0 for the weight of an affine norm.

    Returns:
        The new residual stream (``x`` itself without a branch) and the normalised one, in the dtype of ``x``.
    """
    rows, dim = x.shape[0] * x.shape[1], x.shape[2]
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    _residual_norm_kernel[(rows,)](
        x,
        x if branch is None else branch,
        x if gate is None else gate,
        scale,
        shift,
        total,
        normed,
        *_runs(gate, x),
        *_runs(scale, x),
        dim,
        eps,
        OFFSET=offset,
        HAS_BRANCH=branch is not None,
        HAS_GATE=gate is not None,
        HAS_NORM=True,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=WARPS,
    )
    return total, normed


def gated_add(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x + branch * gate``, shaped as in ``residual_norm``."""
    total = torch.empty_like(x)
    _residual_norm_kernel[(x.shape[0] * x.shape[1],)](
        x,
        branch,
        gate,
        gate,
        gate,
        total,
        total,
        *_runs(gate, x),
        *_runs(gate, x),
        x.shape[2],
        0.0,
        OFFSET=0.0,
        HAS_BRANCH=True,
        HAS_GATE=True,
        HAS_NORM=False,
        BLOCK=triton.next_power_of_2(x.shape[2]),
        num_warps=WARPS,
    )
    return total


def rms_norm_rotate_(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int,
    eps: float,
) -> None:
    """RMS norm over all heads, then rotary embedding, of the queries and the keys within ``qkv``, in place.

    Args:
        qkv: [B, S, 3 * D], contiguous: queries, keys, values.
        query_weight: [D]; ``key_weight`` likewise.
        cos: float32 [S, 1, head_dim / 2]; ``sin`` likewise; each turns a pair of neighbouring channels.
        head_dim: channels of a head.
        eps: added to the mean of squares.
    """
    dim = qkv.shape[2] // 3
    _rms_norm_rotate_kernel[(qkv.shape[0] * qkv.shape[1], 2)](
        qkv,
        query_weight,
        key_weight,
        cos,
        sin,
        qkv.shape[1],
        dim,
        eps,
        HALF_HEAD=head_dim // 2,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=WARPS,
    )


def _runs(values: torch.Tensor | None, x: torch.Tensor) -> tuple[int, int]:
    """How many tokens share a row of ``values``, and how far apart two rows are."""
    if values is None or values.dim() == 1:
        return x.shape[0] * x.shape[1], 0
    return x.shape[1] // values.shape[1], values.stride(1)


@triton.jit  # type: ignore[untyped-decorator]
def _residual_norm_kernel(
    x_ptr,
    branch_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    total_ptr,
    normed_ptr,
    gate_run,
    gate_stride,
    norm_run,
    norm_stride,
    dim,
    eps,
    OFFSET: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    mask = channel < dim
    at = row * dim + channel
    value = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            branch *= tl.load(gate_ptr + (row // gate_run) * gate_stride + channel, mask=mask, other=0.0)
        rounded = (value + branch).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(value, axis=0) / dim
        centred = tl.where(mask, value - mean, 0.0)
        variance = tl.sum(centred * centred, axis=0) / dim
        group = (row // norm_run) * norm_stride + channel
        scale = tl.load(scale_ptr + group, mask=mask, other=0.0)
        shift = tl.load(shift_ptr + group, mask=mask, other=0.0)
        normed = centred * tl.rsqrt(variance + eps) * (OFFSET + scale) + shift
        tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_rotate_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    dim,
    eps,
    HALF_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    weight_ptr = query_weight_ptr if part == 0 else key_weight_ptr
    channel = tl.arange(0, BLOCK)
    mask = channel < dim
    at = row * 3 * dim + part * dim + channel
    value = tl.load(qkv_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps) * weight
    dtype = qkv_ptr.dtype.element_ty
    even, odd = tl.split(tl.reshape(normed.to(dtype).to(tl.float32), (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)
    angle = (row % tokens) * HALF_HEAD + pair % HALF_HEAD
    cos = tl.load(cos_ptr + angle, mask=pair < dim // 2, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=pair < dim // 2, other=0.0)
    turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK,))
    tl.store(qkv_ptr + at, turned.to(dtype), mask=mask)
