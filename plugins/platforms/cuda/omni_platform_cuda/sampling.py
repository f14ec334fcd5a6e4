# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
"""``omni_core.ar.sampling.sample_codes`` as one Triton kernel, one program for each row: the same draws, in one launch.

The k-th likeliest and the share of the likeliest are found bit by bit, which sorts nothing and keeps all that are
equally likely, as the PyTorch form does. At most 32767 candidates.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

_WARPS = 8


def sample_codes(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``omni_core.ar.sampling.SampleCodes``."""
    pdl = current_platform.has_device_capability(90)
    return sample_codes_kernel(logits, temperature, top_k, top_p, seeds, counters, table, pdl=pdl)


def sample_codes_kernel(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    table: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``sample_codes``; with ``table`` [candidates, width] also its rows of what was drawn, [n, width].

    ``pdl``: the launch may overlap the kernel before it (programmatic dependent launch, NVIDIA Hopper and later).
    """
    count, candidates = logits.shape
    codes = torch.empty(count, dtype=torch.int64, device=logits.device)
    rows = None if table is None else table.new_empty(count, table.shape[1])
    _sample_kernel[(count,)](
        logits,
        logits.stride(0),
        temperature,
        top_k,
        top_p,
        seeds,
        counters,
        codes,
        logits if table is None else table,
        logits if rows is None else rows,
        candidates,
        0 if table is None else table.shape[1],
        BLOCK=triton.next_power_of_2(candidates),
        WIDTH=16 if table is None else triton.next_power_of_2(table.shape[1]),
        TABLE=table is not None,
        PDL=pdl,
        num_warps=_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return codes, rows


@triton.jit
def _mix(x):
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _ordered_bits(x):
    """Bits of a float32 as uint32 in the order of the numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _sample_kernel(
    logits,
    stride,
    temperatures,
    top_ks,
    top_ps,
    seeds,
    counters,
    codes,
    table,
    rows,
    candidates,
    width,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    candidate = tl.arange(0, BLOCK)
    inside = candidate < candidates
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row)
    seed = tl.load(seeds + row)
    counter = tl.load(counters + row).to(tl.uint32)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    one = _mix(_mix(low) ^ counter)
    other = _mix(low ^ _mix(high ^ one))
    bits = _mix((one ^ _mix(candidate.to(tl.uint32) + 0x9E3779B9)) + other)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    noise = -tl.log(-tl.log(uniform))
    if PDL:
        tl.extra.cuda.gdc_wait()
    score = tl.load(logits + row * stride + candidate, mask=inside, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        score = score / temperature
        bits = _ordered_bits(score)
        kept = inside
        if top_k > 0 and top_k < candidates:
            # The largest bits that at least top_k candidates reach, two bits at a time.
            least = tl.zeros((), tl.uint32)
            for index in tl.static_range(16):
                step = 1 << (30 - 2 * index)
                # How many reach one and two steps more, counted in one sum, and three.
                both = (bits >= least + step).to(tl.int32) + ((bits >= least + 2 * step).to(tl.int32) << 16)
                counts = tl.sum(tl.where(inside, both, 0))
                third = tl.sum((inside & (bits >= least + 3 * step)).to(tl.int32))
                steps = ((counts & 0xFFFF) >= top_k).to(tl.uint32) + ((counts >> 16) >= top_k).to(tl.uint32)
                least += (steps + (third >= top_k).to(tl.uint32)) * step
            kept &= bits >= least
        if top_p < 1:
            best = tl.max(tl.where(kept, score, float("-inf")))
            share = tl.where(kept, tl.exp(score - best), 0.0)
            wanted = top_p * tl.sum(share)
            # The largest bits such that the candidates above them reach the share: these are the last to be left out.
            least = tl.zeros((), tl.uint32)
            for index in tl.static_range(32):
                tried = least | (1 << (31 - index))
                least = tl.where(tl.sum(tl.where(bits > tried, share, 0.0)) >= wanted, tried, least)
            kept &= bits > least
        score = tl.where(kept, score + noise, float("-inf"))
    code = tl.argmax(score, axis=0, tie_break_left=True)
    tl.store(codes + row, code.to(tl.int64))
    if TABLE:
        column = tl.arange(0, WIDTH)
        value = tl.load(table + code.to(tl.int64) * width + column, mask=column < width)
        tl.store(rows + row * width + column, value, mask=column < width)
