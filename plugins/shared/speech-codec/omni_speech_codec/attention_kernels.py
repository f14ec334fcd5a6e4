# ruff: noqa: N803, N806 (constants of a Triton kernel are written in capitals)
"""Triton kernels for attention of decoders that take a few rows at a time; ``pdl`` is that of ``decode_kernels``."""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from omni_speech_codec.decode_kernels import launch_options


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


class DecodeAttention:
    """Attention of requests that decode, one row each, to vLLM's paged cache: norms, rotation, the cache's new row and
    attention in one kernel.

    Where there are few requests the keys are split among programs, of which the last to end joins what they found.

    Args:
        heads, kv_heads, head_dim: of the layers, which share this.
        most_rows: of a batch.
    """

    PROGRAMS = 512
    """How many a batch is split into, at most."""
    MOST_SPLITS = 8

    def __init__(self, heads: int, kv_heads: int, head_dim: int, most_rows: int, device: torch.device) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        programs = max(self.PROGRAMS, most_rows * kv_heads)
        partial = (heads // kv_heads) * (head_dim + 2)
        self._partials = torch.zeros(programs, partial, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
        cache: tuple[torch.Tensor, torch.Tensor],
        block_table: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        *,
        pdl: bool = False,
    ) -> torch.Tensor:
        """Write the rows' keys and values into the cache, and give what they attend to.

        Args:
            qkv: [rows, (heads + 2 * kv_heads) * head_dim], contiguous, as projected.
            positions: int64 [rows]; a row attends to as many keys before its own.
            cos_sin: [positions, head_dim], cosines and then sines.
            q_norm, k_norm: [head_dim].
            cache: keys and values, [blocks, block size, kv_heads, head_dim] each, in any layout of equal strides.
            block_table: int32 [rows, blocks].
            slots: int64 [rows], where in the cache a row's own key lies; below 0 for rows that are nobody's.
            out: [rows, heads * head_dim], contiguous.
        """
        keys, values = cache
        rows = len(qkv)
        splits = max(1, min(self.MOST_SPLITS, self.PROGRAMS // (rows * self.kv_heads)))
        _decode_attention_kernel[(rows, self.kv_heads, splits)](
            qkv,
            positions,
            cos_sin,
            q_norm,
            k_norm,
            keys,
            values,
            block_table,
            slots,
            out,
            self._partials,
            self._arrived,
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            block_table.stride(0),
            keys.shape[1],
            self.head_dim**-0.5,
            eps,
            HEADS=self.heads,
            KV_HEADS=self.kv_heads,
            HALF=self.head_dim // 2,
            SPLITS=splits,
            KEYS=32,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
        return out


@triton.jit
def _decode_attention_kernel(
    qkv,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    keys,
    values,
    block_table,
    slots,
    out,
    partials,
    arrived,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    block_size,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = 2 * HALF + 2
    row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    d, t, g = tl.arange(0, HALF), tl.arange(0, KEYS), tl.arange(0, GROUP)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k_scale_x, k_scale_y = tl.load(k_norm + d).to(tl.float32), tl.load(k_norm + HALF + d).to(tl.float32)
    q_scale_x, q_scale_y = tl.load(q_norm + d).to(tl.float32), tl.load(q_norm + HALF + d).to(tl.float32)
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    table = cos_sin + position * 2 * HALF + d
    cos, sin = tl.load(table).to(tl.float32), tl.load(table + HALF).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    base = qkv + row * (HEADS + 2 * KV_HEADS) * 2 * HALF
    head = group * GROUP + g
    place = base + head[:, None] * 2 * HALF + d[None, :]
    x, y = tl.load(place).to(tl.float32), tl.load(place + HALF).to(tl.float32)
    factor = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * HALF) + eps)[:, None]
    query_x, query_y = _rotated(
        x, y, q_scale_x[None, :], q_scale_y[None, :], cos[None, :], sin[None, :], factor * scale
    )
    best = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    sum_x, sum_y = tl.zeros((GROUP, HALF), tl.float32), tl.zeros((GROUP, HALF), tl.float32)
    if (split == 0) & (slot >= 0):
        # The row's own key and value, which no other program needs.
        own = base + (HEADS + group) * 2 * HALF + d
        own_x, own_y = tl.load(own).to(tl.float32), tl.load(own + HALF).to(tl.float32)
        own_factor = tl.rsqrt((tl.sum(own_x * own_x) + tl.sum(own_y * own_y)) / (2 * HALF) + eps)
        own_x, own_y = _rotated(own_x, own_y, k_scale_x, k_scale_y, cos, sin, own_factor)
        own += KV_HEADS * 2 * HALF
        own_value_x, own_value_y = tl.load(own), tl.load(own + HALF)
        kept = (slot // block_size) * block_stride + (slot % block_size) * token_stride + group * head_stride + d
        tl.store(keys + kept, own_x.to(keys.dtype.element_ty))
        tl.store(keys + kept + HALF, own_y.to(keys.dtype.element_ty))
        tl.store(values + kept, own_value_x)
        tl.store(values + kept + HALF, own_value_y)
        best = tl.sum(query_x * own_x[None, :], axis=1) + tl.sum(query_y * own_y[None, :], axis=1)
        total = tl.full((GROUP,), 1.0, tl.float32)
        sum_x += own_value_x.to(tl.float32)[None, :]
        sum_y += own_value_y.to(tl.float32)[None, :]
    count = tl.where(slot >= 0, position, 0).to(tl.int32)
    for begin in range(split * KEYS, count, SPLITS * KEYS):
        index = begin + t
        seen = index < count
        block = tl.load(block_table + row * table_stride + index // block_size, mask=seen, other=0).to(tl.int64)
        offset = block * block_stride + (index % block_size) * token_stride + group * head_stride
        place_2d = offset[:, None] + d[None, :]
        key_x = tl.load(keys + place_2d, mask=seen[:, None], other=0).to(tl.float32)
        key_y = tl.load(keys + place_2d + HALF, mask=seen[:, None], other=0).to(tl.float32)
        value_x = tl.load(values + place_2d, mask=seen[:, None], other=0).to(tl.float32)
        value_y = tl.load(values + place_2d + HALF, mask=seen[:, None], other=0).to(tl.float32)
        score = tl.sum(query_x[:, None, :] * key_x[None, :, :], axis=2)
        score += tl.sum(query_y[:, None, :] * key_y[None, :, :], axis=2)
        score = tl.where(seen[None, :], score, float("-inf"))
        better = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - better[:, None])
        keep = tl.exp(best - better)
        total = total * keep + tl.sum(weight, axis=1)
        sum_x = sum_x * keep[:, None] + tl.sum(weight[:, :, None] * value_x[None, :, :], axis=1)
        sum_y = sum_y * keep[:, None] + tl.sum(weight[:, :, None] * value_y[None, :, :], axis=1)
        best = better
    target = out + row * HEADS * 2 * HALF + head[:, None] * 2 * HALF + d[None, :]
    if SPLITS == 1:
        total = tl.where(total > 0, total, 1.0)
        tl.store(target, (sum_x / total[:, None]).to(out.dtype.element_ty))
        tl.store(target + HALF, (sum_y / total[:, None]).to(out.dtype.element_ty))
    else:
        pair = row * KV_HEADS + group
        mine = partials + (pair * SPLITS + split) * GROUP * WIDTH + g * WIDTH
        tl.store(mine, best)
        tl.store(mine + 1, total)
        tl.store(mine[:, None] + 2 + d[None, :], sum_x)
        tl.store(mine[:, None] + 2 + HALF + d[None, :], sum_y)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
        if before == SPLITS - 1:
            best = tl.full((GROUP,), float("-inf"), tl.float32)
            total = tl.zeros((GROUP,), tl.float32)
            sum_x, sum_y = tl.zeros((GROUP, HALF), tl.float32), tl.zeros((GROUP, HALF), tl.float32)
            for other in tl.static_range(SPLITS):
                theirs = partials + (pair * SPLITS + other) * GROUP * WIDTH + g * WIDTH
                other_best = tl.load(theirs, cache_modifier=".cg")
                better = tl.maximum(best, other_best)
                keep = tl.where(best > float("-inf"), tl.exp(best - better), 0.0)
                theirs_keep = tl.where(other_best > float("-inf"), tl.exp(other_best - better), 0.0)
                total = total * keep + tl.load(theirs + 1, cache_modifier=".cg") * theirs_keep
                other_x = tl.load(theirs[:, None] + 2 + d[None, :], cache_modifier=".cg")
                other_y = tl.load(theirs[:, None] + 2 + HALF + d[None, :], cache_modifier=".cg")
                sum_x = sum_x * keep[:, None] + other_x * theirs_keep[:, None]
                sum_y = sum_y * keep[:, None] + other_y * theirs_keep[:, None]
                best = better
            total = tl.where(total > 0, total, 1.0)
            tl.store(target, (sum_x / total[:, None]).to(out.dtype.element_ty))
            tl.store(target + HALF, (sum_y / total[:, None]).to(out.dtype.element_ty))
            tl.store(arrived + pair, 0)
