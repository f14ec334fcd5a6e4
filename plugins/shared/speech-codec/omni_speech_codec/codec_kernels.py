# ruff: noqa: N803, N806 (constants of a Triton kernel are written in capitals)
"""Triton kernels of the codec's decoder on CUDA; ``fused_network.py`` puts them together.

Activations are contiguous [rows, channels], rows being positions of one session after those of another: ``rows =
batch * length``. What a layer needs of a session's earlier positions lies in a pool, [slots, size]: ``slots`` int32
[batch] says where, and ``positions`` int32 [batch] how many frames came before, since what would lie before the first
counts as zero whatever an earlier session left in the slot, and so do the first ``skipped`` positions. Products are
added up in float32, and everything between a product and the next is computed in float32 too.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE, SNAKE, GELU, GATED = (tl.constexpr(value) for value in range(4))
"""What follows a product: nothing, ``Snake``, GELU, or SiLU of one half times the other."""


@triton.jit
def _snake(x, turns, strength):
    """``x + strength * sin(pi * turns * x)^2``; the square of the sine has the period 1 in ``turns * x``."""
    t = x * turns
    t -= (t + 12582912.0) - 12582912.0  # the nearest integer: 1.5 * 2^23 leaves no digits behind the point
    z = t * t
    # least squares weighted for the worst error, 4e-7, for |t| <= 1/2
    square = 9.869524955749512 + z * (
        -32.46514129638672 + z * (42.64342498779297 + z * (-29.426273345947266 + z * 10.581299781799316))
    )
    return x + strength * (z * square)


@triton.jit
def _inner(acc, n, bias, turns, strength):
    """Bias and snake of columns ``n`` of a unit's first product."""
    return _snake(acc + tl.load(bias + n)[None, :], tl.load(turns + n)[None, :], tl.load(strength + n)[None, :])


@triton.jit
def _finish(
    acc, m, n, inside, columns, bias, residual, scale, turns, strength, raw, out,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, RAW: tl.constexpr,
    OUT: tl.constexpr = True,
):  # fmt: skip
    """Bias, scale and residual of a tile of a product; store it in ``raw``, and with its activation in ``out``."""
    mask = inside[:, None] & (n < columns)[None, :]
    at = m.to(tl.int64)[:, None] * columns + n[None, :]
    if BIASED:
        acc += tl.load(bias + n)[None, :]
    if SCALED:
        acc *= tl.load(scale + n)[None, :]
    if ADDED:
        acc += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if RAW:
        tl.store(raw + at, acc.to(raw.dtype.element_ty), mask=mask)
    if ACTIVATION == SNAKE:
        acc = _snake(acc, tl.load(turns + n)[None, :], tl.load(strength + n)[None, :])
    elif ACTIVATION == GELU:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    if OUT and ACTIVATION != NONE:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    return acc


@triton.jit
def _operand(
    x, pool, slots, positions, m, rows, length, slot_size, rate, skipped, dilation,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Where rows ``m`` of a convolution's input begin, for its first tap: ``_tap`` goes on from there."""
    reach = (TAPS - 1) * dilation
    inside = m < rows
    begin = (m.to(tl.int64) - reach) * CHANNELS
    here = x + begin
    time = m
    jump = begin
    begun = m
    if TAPS > 1:
        session = m // length
        time = m - session * length - reach
        slot = tl.load(slots + session, mask=inside, other=0).to(tl.int64)
        begun = tl.load(positions + session, mask=inside, other=0) * rate - skipped
        # From where a row would be to where the pool has it. Loads stay wide, and are pipelined, where this number is
        # multiplied with the condition; where it or the pointer is selected by it, the compiler loads one by one.
        between = (pool.to(tl.int64) - x.to(tl.int64)) // (x.dtype.element_ty.primitive_bitwidth // 8)
        jump = between + slot * slot_size + (time + reach) * CHANNELS - begin
        if CHANNELS % 8 == 0:
            jump = tl.multiple_of(jump, 8)
    return inside, here, jump, time, begun


@triton.jit
def _tap(
    here, jump, inside, time, begun, k, column, dilation,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """A tile of a convolution's input: columns from ``k`` on of [rows, TAPS * PADDED]."""
    tap = k // PADDED
    channel = k - tap * PADDED + column
    mask = inside
    rows = here
    if TAPS > 1:
        shift = tap * dilation
        rows = here + (jump * (time + shift < 0).to(tl.int64) + shift * CHANNELS)
        mask = inside & (time + shift + begun >= 0)
    mask = mask[:, None]
    if PADDED != CHANNELS:
        mask = mask & (channel < CHANNELS)[None, :]
    return tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows", "length", "rate", "skipped", "dilation"])
def product_kernel(
    x, pool, weight, bias, residual, scale, turns, strength, raw, out, slots, positions,
    rows, length, rate, skipped, dilation, slot_size, columns, weight_columns,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, RAW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SECOND_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A causal convolution over time as one product, [rows, TAPS * PADDED] by [TAPS * PADDED, columns].

    A tile has ``BLOCK_N + SECOND_N`` columns, in two parts since each has to be a power of two: the second is the next
    columns, or for ``GATED`` the same ones of the other half.
    """
    GATE: tl.constexpr = ACTIVATION == GATED
    STEP: tl.constexpr = BLOCK_N if GATE else BLOCK_N + SECOND_N
    tiles = tl.cdiv(columns, STEP)
    m = (tl.program_id(0) // tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (tl.program_id(0) % tiles) * STEP
    n = first + tl.arange(0, BLOCK_N)
    inside, here, jump, time, begun = _operand(
        x, pool, slots, positions, m, rows, length, slot_size, rate, skipped, dilation, CHANNELS, TAPS
    )
    column = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SECOND_N > 0:
        n2 = first + tl.arange(0, SECOND_N) + (columns if GATE else BLOCK_N)
        acc2 = tl.zeros((BLOCK_M, SECOND_N), tl.float32)
    for k in range(0, TAPS * PADDED, BLOCK_K):
        a = _tap(here, jump, inside, time, begun, k, column, dilation, CHANNELS, PADDED, TAPS)
        row = weight + (k + column)[:, None] * weight_columns
        acc = tl.dot(a, tl.load(row + n[None, :]), acc, input_precision=PRECISION)
        if SECOND_N > 0:
            acc2 = tl.dot(a, tl.load(row + n2[None, :]), acc2, input_precision=PRECISION)
    if GATE:
        acc = acc / (1.0 + tl.exp(-acc)) * acc2
    _finish(
        acc, m, n, inside, columns, bias, residual, scale, turns, strength, raw, out,
        NONE if GATE else ACTIVATION, BIASED, ADDED, SCALED, RAW,
    )  # fmt: skip
    if SECOND_N > 0 and not GATE:
        _finish(
            acc2, m, n2, inside, columns, bias, residual, scale, turns, strength, raw, out,
            ACTIVATION, BIASED, ADDED, SCALED, RAW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "length", "rate", "skipped", "dilation"])
def unit_kernel(
    x, pool, weight, bias, inner_turns, inner_strength, weight2, bias2, residual, turns, strength, raw, out,
    head_weight, heads, slots, positions, rows, length, rate, skipped, dilation, slot_size,
    CHANNELS: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr, RAW: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SECOND_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A ``SnakeResidual`` whose channels are one tile, in one or two parts, between the snakes around it.

    With ``HEAD``, what a last convolution to one channel makes of each position goes into ``heads`` instead of the
    positions themselves: float32 [rows, 8], one column for each tap.
    """
    WIDTH: tl.constexpr = BLOCK_N + SECOND_N
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    inside, here, jump, time, begun = _operand(
        x, pool, slots, positions, m, rows, length, slot_size, rate, skipped, dilation, CHANNELS, TAPS
    )
    column = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SECOND_N > 0:
        n2 = BLOCK_N + tl.arange(0, SECOND_N)
        acc2 = tl.zeros((BLOCK_M, SECOND_N), tl.float32)
    for k in range(0, TAPS * PADDED, BLOCK_K):
        a = _tap(here, jump, inside, time, begun, k, column, dilation, CHANNELS, PADDED, TAPS)
        row = weight + (k + column)[:, None] * WIDTH
        acc = tl.dot(a, tl.load(row + n[None, :]), acc, input_precision=PRECISION)
        if SECOND_N > 0:
            acc2 = tl.dot(a, tl.load(row + n2[None, :]), acc2, input_precision=PRECISION)
    y = _inner(acc, n, bias, inner_turns, inner_strength).to(x.dtype.element_ty)
    acc = tl.dot(y, tl.load(weight2 + n[:, None] * WIDTH + n[None, :]), input_precision=PRECISION)
    if SECOND_N > 0:
        y2 = _inner(acc2, n2, bias, inner_turns, inner_strength).to(x.dtype.element_ty)
        acc = tl.dot(y2, tl.load(weight2 + n2[:, None] * WIDTH + n[None, :]), acc, input_precision=PRECISION)
        acc2 = tl.dot(y, tl.load(weight2 + n[:, None] * WIDTH + n2[None, :]), input_precision=PRECISION)
        acc2 = tl.dot(y2, tl.load(weight2 + n2[:, None] * WIDTH + n2[None, :]), acc2, input_precision=PRECISION)
    acc = _finish(
        acc, m, n, inside, CHANNELS, bias2, residual, bias2, turns, strength, raw, out,
        SNAKE, True, True, False, RAW, not HEAD,
    )  # fmt: skip
    if SECOND_N > 0:
        acc2 = _finish(
            acc2, m, n2, inside, CHANNELS, bias2, residual, bias2, turns, strength, raw, out,
            SNAKE, True, True, False, RAW, not HEAD,
        )  # fmt: skip
    if HEAD:
        tap = tl.arange(0, 16)
        w = tl.load(head_weight + n[:, None] * 16 + tap[None, :])
        parts = tl.dot(acc.to(w.dtype), w, input_precision=PRECISION)
        if SECOND_N > 0:
            w = tl.load(head_weight + n2[:, None] * 16 + tap[None, :])
            parts = tl.dot(acc2.to(w.dtype), w, parts, input_precision=PRECISION)
        tl.store(heads + m[:, None] * 8 + tap[None, :], parts, mask=inside[:, None] & (tap < 8)[None, :])


@triton.jit(do_not_specialize=["rows", "length", "rate", "skipped"])
def samples_kernel(
    heads, pool, bias, out, slots, positions, rows, length, rate, skipped, slot_size,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``heads`` of ``unit_kernel``, one column of each of the last ``TAPS`` rows, to samples in [-1, 1]."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, here, jump, time, begun = _operand(
        heads, pool, slots, positions, m, rows, length, slot_size, rate, skipped, 1, 8, TAPS
    )
    total = tl.zeros((BLOCK,), tl.float32) + tl.load(bias)
    for tap in tl.static_range(TAPS):
        row = here + tl.where(time + tap >= 0, 0, jump) + tap * 8 + tap
        total += tl.load(row, mask=inside & (time + tap + begun >= 0), other=0.0)
    tl.store(out + m, tl.minimum(tl.maximum(total, -1.0), 1.0), mask=inside)


@triton.jit(do_not_specialize=["length", "rate", "skipped", "reach"])
def carry_kernel(
    x, pool, slots, positions, length, rate, skipped, slot_size, channels, reach,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The last ``reach`` positions of each session take the place of those in the pool."""
    session = tl.program_id(0)
    row = tl.arange(0, BLOCK_R)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begun = tl.load(positions + session) * rate - skipped
    kept = pool + tl.load(slots + session).to(tl.int64) * slot_size
    time = row + length - reach
    here = x + (session.to(tl.int64) * length + time) * channels
    jump = kept.to(tl.int64) - x.to(tl.int64)  # see ``_operand``
    jump = jump // (x.dtype.element_ty.primitive_bitwidth // 8) + (reach - session.to(tl.int64) * length) * channels
    source = here + jump * (time < 0).to(tl.int64)
    fits = (row < reach)[:, None] & (channel < channels)[None, :]
    value = tl.load(source[:, None] + channel[None, :], mask=fits & (time + begun >= 0)[:, None], other=0.0)
    tl.debug_barrier()  # all has been read before anything is written: places overlap where the chunk is short
    tl.store(kept + row[:, None] * channels + channel[None, :], value, mask=fits)


@triton.jit(do_not_specialize=["length", "rate"])
def depthwise_norm_kernel(
    x, pool, weight, bias, norm_weight, norm_bias, out, slots, positions, length, rate, slot_size, channels, eps,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A depthwise causal convolution of one row, then its layer norm; weights float32, [TAPS, channels]."""
    m = tl.program_id(0)
    session = m // length
    time = m - session * length
    begun = tl.load(positions + session) * rate
    kept = pool + tl.load(slots + session).to(tl.int64) * slot_size
    channel = tl.arange(0, BLOCK)
    mask = channel < channels
    total = tl.load(bias + channel, mask=mask, other=0.0)
    for tap in tl.static_range(TAPS):
        at = time + tap - (TAPS - 1)
        row = tl.where(at >= 0, x + (m.to(tl.int64) + tap - (TAPS - 1)) * channels, kept + (time + tap) * channels)
        there = channel < tl.where(at + begun >= 0, channels, 0)
        value = tl.load(row + channel, mask=there, other=0.0).to(tl.float32)
        total += value * tl.load(weight + tap * channels + channel, mask=mask, other=0.0)
    mean = tl.sum(total, axis=0) / channels
    centred = tl.where(mask, total - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / channels + eps)
    total = centred * scale * tl.load(norm_weight + channel, mask=mask, other=0.0)
    total += tl.load(norm_bias + channel, mask=mask, other=0.0)
    tl.store(out + m.to(tl.int64) * channels + channel, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_kernel(x, weight, out, channels, eps, BLOCK: tl.constexpr):
    """Root mean square norm of one row; the weight is float32."""
    at = tl.program_id(0).to(tl.int64) * channels + tl.arange(0, BLOCK)
    channel = tl.arange(0, BLOCK)
    mask = channel < channels
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / channels + eps)
    value *= tl.load(weight + channel, mask=mask, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def entries_kernel(
    codes, entries, out, size, width, scale, GROUPS: tl.constexpr, LEADING: tl.constexpr, BLOCK: tl.constexpr
):
    """Codes int32 [rows, GROUPS] to [rows, width] or twice as wide: the sum of the ``LEADING`` groups' entries, and of
    the others' if there are any."""
    m = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    mask = channel < width
    at = out + m.to(tl.int64) * width * (2 if LEADING < GROUPS else 1) + channel
    total = tl.zeros((BLOCK,), tl.float32)
    for group in tl.static_range(LEADING):
        code = tl.load(codes + m * GROUPS + group) + group * size
        total += tl.load(entries + code.to(tl.int64) * width + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (total * scale).to(out.dtype.element_ty), mask=mask)
    if LEADING < GROUPS:
        total = tl.zeros((BLOCK,), tl.float32)
        for group in tl.static_range(LEADING, GROUPS):
            code = tl.load(codes + m * GROUPS + group) + group * size
            total += tl.load(entries + code.to(tl.int64) * width + channel, mask=mask, other=0.0).to(tl.float32)
        tl.store(at + width, (total * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(x, at, other, mask, cos, sin):
    """A tile times the rotary embedding: ``other`` is where each channel's partner in the other half lies."""
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
    return (value * cos + partner * sin).to(x.dtype.element_ty)


@triton.jit(do_not_specialize=["length"])
def attention_kernel(
    qkv, pool, frequencies, out, slots, positions, length, slot_size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rotary embedding and attention over a sliding window, of one head of one session's chunk.

    Keys and values of earlier positions are in rings of the pool, [2, KV_HEADS, RING, WIDTH], position p at p modulo
    ``RING``, which is long enough that the chunk's own ones, written here, displace none that the chunk sees. Keys are
    kept rotated.
    """
    session = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    begun = tl.load(positions + session)
    ring = pool + tl.load(slots + session).to(tl.int64) * slot_size + kv_head * (RING * WIDTH)
    VALUES: tl.constexpr = KV_HEADS * RING * WIDTH
    d = tl.arange(0, WIDTH)
    turned = (d + WIDTH // 2) % WIDTH
    q = tl.arange(0, BLOCK_Q)
    inside = (q < length)[:, None]
    angle = (begun + q).to(tl.float32)[:, None] * tl.load(frequencies + d % (WIDTH // 2))[None, :]
    cos = tl.cos(angle)
    sin = tl.where((d < WIDTH // 2)[None, :], -tl.sin(angle), tl.sin(angle))
    row = (session * length + q)[:, None] * ((HEADS + 2 * KV_HEADS) * WIDTH)
    query = _rotated(qkv + head * WIDTH, row + d[None, :], row + turned[None, :], inside, cos, sin)
    start = qkv + (HEADS + kv_head) * WIDTH
    key = _rotated(start, row + d[None, :], row + turned[None, :], inside, cos, sin)
    value = tl.load(start + KV_HEADS * WIDTH + row + d[None, :], mask=inside, other=0.0)

    p = tl.arange(0, BLOCK_P)
    at = begun + p - (WINDOW - 1)
    seen = (p < WINDOW - 1) & (at >= 0)
    place = (tl.where(seen, at, 0) % RING)[:, None] * WIDTH + d[None, :]
    old_key = tl.load(ring + place, mask=seen[:, None], other=0.0)
    old_value = tl.load(ring + VALUES + place, mask=seen[:, None], other=0.0)

    own = ((begun + q) % RING)[:, None] * WIDTH + d[None, :]
    writes = (q < tl.where(head % (HEADS // KV_HEADS) == 0, length, 0))[:, None]  # one head of those that share it
    tl.store(ring + own, key, mask=writes)
    tl.store(ring + VALUES + own, value, mask=writes)

    scale: tl.constexpr = WIDTH**-0.5
    scores = tl.dot(query, tl.trans(old_key), input_precision=PRECISION) * scale
    scores = tl.where(seen[None, :] & (p[None, :] >= q[:, None]), scores, -1e30)
    fresh = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    back = q[:, None] - q[None, :]
    fresh = tl.where((back >= 0) & (back < WINDOW), fresh, -1e30)
    most = tl.maximum(tl.max(scores, axis=1), tl.max(fresh, axis=1))[:, None]
    scores, fresh = tl.exp(scores - most), tl.exp(fresh - most)
    total = tl.sum(scores, axis=1) + tl.sum(fresh, axis=1)
    y = tl.dot(scores.to(value.dtype), old_value, input_precision=PRECISION)
    y += tl.dot(fresh.to(value.dtype), value, input_precision=PRECISION)
    y /= total[:, None]
    into = (session * length + q)[:, None] * (HEADS * WIDTH) + head * WIDTH + d[None, :]
    tl.store(out + into, y.to(out.dtype.element_ty), mask=inside)
