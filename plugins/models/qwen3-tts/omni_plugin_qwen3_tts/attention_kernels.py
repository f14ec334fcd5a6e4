# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
"""Triton kernels for attention of decoders that take a few rows at a time; ``pdl`` is that of ``decode_kernels``."""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from omni_plugin_qwen3_tts.decode_kernels import launch_options


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
        **launch_options(pdl),
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
        **launch_options(pdl),
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
