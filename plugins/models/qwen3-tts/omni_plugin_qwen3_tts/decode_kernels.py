# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
"""Triton kernels for decoders that take a few rows at a time, where a step's time is that of launches and of reading
weights: a norm, a matrix product and what follows it in one kernel.

With ``pdl`` (programmatic dependent launch, NVIDIA Hopper and later) a kernel starts while the one before it still
runs, fetches its weights, and only then waits for its input.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

FEW = 8
"""Up to so many rows a product is summed without tensor cores."""


def few_rows_shape(rows: int, outputs: int, inputs: int, swiglu: bool) -> dict[str, int]:
    """Of a program that sums without tensor cores: what its registers hold of the weights."""
    width = triton.next_power_of_2(inputs)
    return {"BLOCK_N": max(2, 16384 // width // (2 if swiglu else 1)), "num_warps": 8}


def many_rows_shape(rows: int, outputs: int, inputs: int, swiglu: bool) -> dict[str, int]:
    """Of a program of tensor cores: its part of the product, and how far ahead it fetches."""
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 32 if outputs >= 2048 else 16,
        "BLOCK_K": 128,
        "PREFETCH": 1,
        "EARLY": 1,
        "num_warps": 4,
        "num_stages": 5 if block_m < 64 else 4,
    }


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``out = residual + act(rms_norm(x) @ weight.T + bias)``, each part where it is asked for.

    Args:
        x: [rows, inputs]; its last dimension is contiguous.
        weight: [outputs, inputs], or with ``swiglu`` [2 * outputs, inputs]: gates first, then what they multiply.
        out: [rows, outputs], or [requests, positions, outputs] for as many rows; its last dimension is contiguous.
        norm: [inputs], the weight of the norm.
        residual: [rows, outputs], may be ``out``.
        bias: [outputs].

    Returns:
        ``out``.
    """
    rows, inputs = x.shape
    outputs = out.shape[-1]
    positions = out.shape[1] if out.dim() == 3 else 1
    strides = (out.stride(0), out.stride(1)) if out.dim() == 3 else (out.stride(0), 0)
    arguments = (
        x,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        rows,
        outputs,
        inputs,
        x.stride(0),
        positions,
        *strides,
        0 if residual is None else residual.stride(0),
        eps,
    )
    parts = {
        "NORM": norm is not None,
        "SWIGLU": swiglu,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    if rows <= FEW:
        shape = few_rows_shape(rows, outputs, inputs, swiglu)
        width = triton.next_power_of_2(inputs)
        _few_rows_kernel[(triton.cdiv(outputs, shape["BLOCK_N"]),)](
            *arguments,
            ROWS=triton.next_power_of_2(rows),
            WIDTH=width,
            EVEN=width == inputs and outputs % shape["BLOCK_N"] == 0,
            **shape,
            **parts,
        )
        return out
    shape = many_rows_shape(rows, outputs, inputs, swiglu)
    _many_rows_kernel[(triton.cdiv(outputs, shape["BLOCK_N"]), triton.cdiv(rows, shape["BLOCK_M"]))](
        *arguments,
        LINES=triton.next_power_of_2(triton.cdiv(inputs * weight.element_size(), 128)),
        **shape,
        **parts,
    )
    return out


@triton.jit
def _few_rows_kernel(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    positions,
    out_stride,
    position_stride,
    residual_stride,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of the weights of a program are in its registers before it waits for its input."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDTH)
    inside = n < outputs
    place = n[:, None].to(tl.int64) * inputs + k[None, :]
    if EVEN:
        w = tl.load(weight + place)
        if SWIGLU:
            up = tl.load(weight + outputs.to(tl.int64) * inputs + place)
        if NORM:
            scale = tl.load(norm + k).to(tl.float32)
    else:
        within = inside[:, None] & (k < inputs)[None, :]
        w = tl.load(weight + place, mask=within, other=0)
        if SWIGLU:
            up = tl.load(weight + outputs.to(tl.int64) * inputs + place, mask=within, other=0)
        if NORM:
            scale = tl.load(norm + k, mask=k < inputs, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for m in tl.static_range(ROWS):
        if m < rows:
            if EVEN:
                row = tl.load(x + m * x_stride + k).to(tl.float32)
            else:
                row = tl.load(x + m * x_stride + k, mask=k < inputs, other=0).to(tl.float32)
            factor = 1.0
            if NORM:
                factor = tl.rsqrt(tl.sum(row * row) / inputs + eps)
                row = row * scale
            total = tl.sum(w.to(tl.float32) * row[None, :], axis=1) * factor
            if SWIGLU:
                total = total * tl.sigmoid(total) * (tl.sum(up.to(tl.float32) * row[None, :], axis=1) * factor)
            if BIAS:
                total += tl.load(bias + n, mask=inside, other=0).to(tl.float32)
            if RESIDUAL:
                total += tl.load(residual + m * residual_stride + n, mask=inside, other=0).to(tl.float32)
            target = out + (m // positions) * out_stride + (m % positions) * position_stride + n
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)


_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def _many_rows_kernel(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    positions,
    out_stride,
    position_stride,
    residual_stride,
    eps,
    LINES: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights are fetched into the second-level cache before a program waits for its input."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = n < outputs
    begin = tl.where(inside, n, 0)[:, None].to(tl.int64) * inputs
    second = outputs.to(tl.int64) * inputs
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH:
            line = begin + tl.minimum(tl.arange(0, LINES) * 64, inputs - 1)[None, :]
            tl.inline_asm_elementwise(_PREFETCH, "=r,l", [weight + line], dtype=tl.int32, is_pure=False, pack=1)
            if SWIGLU:
                line += second
                tl.inline_asm_elementwise(_PREFETCH, "=r,l", [weight + line], dtype=tl.int32, is_pure=False, pack=1)
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ups = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for at in range(0, inputs, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        within = k < inputs
        a = tl.load(x + m[:, None] * x_stride + k[None, :], mask=(m < rows)[:, None] & within[None, :], other=0)
        w = tl.load(weight + begin + k[None, :], mask=inside[:, None] & within[None, :], other=0)
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            a = (wide * tl.load(norm + k, mask=within, other=0).to(tl.float32)[None, :]).to(w.dtype)
        total = tl.dot(a, w.T, total, input_precision="ieee")
        if SWIGLU:
            up = tl.load(weight + second + begin + k[None, :], mask=inside[:, None] & within[None, :], other=0)
            ups = tl.dot(a, up.T, ups, input_precision="ieee")
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        factor = tl.rsqrt(squares / inputs + eps)[:, None]
        total *= factor
        ups *= factor
    if SWIGLU:
        total = total * tl.sigmoid(total) * ups
    stored = (m < rows)[:, None] & inside[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0).to(tl.float32)[None, :]
    if RESIDUAL:
        total += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=stored, other=0).to(tl.float32)
    target = out + (m // positions)[:, None] * out_stride + (m % positions)[:, None] * position_stride + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=stored)


def rotate_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """Normalise and rotate the queries and keys of [rows, (heads + 2 * kv_heads) * head_dim], in place.

    Args:
        positions: int64 [rows].
        cos_sin: [positions, head_dim], cosines and then sines, as vLLM's rotary embeddings keep them.
        q_norm, k_norm: [head_dim].
    """
    _rotate_heads_kernel[(len(qkv), heads + kv_heads)](
        qkv,
        positions,
        cos_sin,
        q_norm,
        k_norm,
        qkv.stride(0),
        eps,
        HEADS=heads,
        HALF=q_norm.shape[0] // 2,
        PDL=pdl,
        num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )


@triton.jit
def _rotated(x, y, scale_x, scale_y, cos, sin, factor):
    x, y = x * factor * scale_x, y * factor * scale_y
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def _rotate_heads_kernel(
    qkv, positions, cos_sin, q_norm, k_norm, stride, eps, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr
):
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HALF)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    norm = q_norm if head < HEADS else k_norm
    scale_x, scale_y = tl.load(norm + d).to(tl.float32), tl.load(norm + HALF + d).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    table = cos_sin + tl.load(positions + row) * 2 * HALF + d
    cos, sin = tl.load(table).to(tl.float32), tl.load(table + HALF).to(tl.float32)
    place = qkv + row.to(tl.int64) * stride + head * 2 * HALF + d
    x, y = tl.load(place).to(tl.float32), tl.load(place + HALF).to(tl.float32)
    factor = tl.rsqrt((tl.sum(x * x) + tl.sum(y * y)) / (2 * HALF) + eps)
    x, y = _rotated(x, y, scale_x, scale_y, cos, sin, factor)
    tl.store(place, x.to(qkv.dtype.element_ty))
    tl.store(place + HALF, y.to(qkv.dtype.element_ty))


def attend_frame(
    history: torch.Tensor,
    first: int,
    count: int,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention within a frame, of whose positions there are few: norms, rotation, softmax and sum in one kernel.

    Args:
        history: [requests, positions, (heads + 2 * kv_heads) * head_dim], queries, keys and values as projected.
        first: position of the first query.
        count: queries of each request, at positions ``first`` and on.
        q_norm, k_norm: [head_dim].
        cos, sin: float32 [positions, head_dim / 2].
        out: [requests * count, heads * head_dim].

    Returns:
        ``out``.
    """
    head_dim = q_norm.shape[0]
    _attend_frame_kernel[(history.shape[0] * count, kv_heads)](
        history,
        q_norm,
        k_norm,
        cos,
        sin,
        out,
        history.stride(0),
        history.stride(1),
        out.stride(0),
        first,
        count,
        head_dim**-0.5,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        KEYS=triton.next_power_of_2(history.shape[1]),
        PDL=pdl,
        num_warps=2,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@triton.jit
def _attend_frame_kernel(
    history,
    q_norm,
    k_norm,
    cos,
    sin,
    out,
    request_stride,
    position_stride,
    out_stride,
    first,
    count,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, group = tl.program_id(0), tl.program_id(1)
    d, t = tl.arange(0, HALF), tl.arange(0, KEYS)
    position = first + row % count
    seen = t <= position
    table = t[:, None] * HALF + d[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k_scale_x, k_scale_y = tl.load(k_norm + d).to(tl.float32), tl.load(k_norm + HALF + d).to(tl.float32)
    q_scale_x, q_scale_y = tl.load(q_norm + d).to(tl.float32), tl.load(q_norm + HALF + d).to(tl.float32)
    k_cos = tl.load(cos + table, mask=seen[:, None], other=0)
    k_sin = tl.load(sin + table, mask=seen[:, None], other=0)
    q_cos, q_sin = tl.load(cos + position * HALF + d), tl.load(sin + position * HALF + d)
    if PDL:
        tl.extra.cuda.gdc_wait()
    base = history + (row // count).to(tl.int64) * request_stride
    place = base + t[:, None] * position_stride + (HEADS + group) * 2 * HALF + d[None, :]
    x = tl.load(place, mask=seen[:, None], other=0).to(tl.float32)
    y = tl.load(place + HALF, mask=seen[:, None], other=0).to(tl.float32)
    value_x = tl.load(place + KV_HEADS * 2 * HALF, mask=seen[:, None], other=0).to(tl.float32)
    value_y = tl.load(place + KV_HEADS * 2 * HALF + HALF, mask=seen[:, None], other=0).to(tl.float32)
    factor = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * HALF) + eps)[:, None]
    key_x, key_y = _rotated(x, y, k_scale_x[None, :], k_scale_y[None, :], k_cos, k_sin, factor)
    for index in tl.static_range(HEADS // KV_HEADS):
        head = group * (HEADS // KV_HEADS) + index
        query = base + position * position_stride + head * 2 * HALF + d
        x = tl.load(query).to(tl.float32)
        y = tl.load(query + HALF).to(tl.float32)
        factor_q = tl.rsqrt((tl.sum(x * x) + tl.sum(y * y)) / (2 * HALF) + eps)
        query_x, query_y = _rotated(x, y, q_scale_x, q_scale_y, q_cos, q_sin, factor_q)
        score = tl.sum(key_x * query_x[None, :], axis=1) + tl.sum(key_y * query_y[None, :], axis=1)
        score = tl.where(seen, score * scale, float("-inf"))
        weight = tl.exp(score - tl.max(score))
        weight = weight / tl.sum(weight)
        target = out + row.to(tl.int64) * out_stride + head * 2 * HALF + d
        tl.store(target, tl.sum(value_x * weight[:, None], axis=0).to(out.dtype.element_ty))
        tl.store(target + HALF, tl.sum(value_y * weight[:, None], axis=0).to(out.dtype.element_ty))
