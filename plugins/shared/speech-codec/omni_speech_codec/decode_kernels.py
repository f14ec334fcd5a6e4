# ruff: noqa: N803 (constants of a Triton kernel are written in capitals)
"""Triton kernels for decoders that take a few rows at a time, where a step's time is that of launches and of reading
weights: a norm, a matrix product and what follows it in one kernel.

With ``pdl`` (programmatic dependent launch, NVIDIA Hopper and later) a kernel starts while the one before it still
runs, fetches its weights, and only then waits for its input.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

FEW, SOME, MANY = 2, 16, 64
"""Up to so many rows a product is summed without tensor cores; has its weights fetched before its input is there; is of
this module at all."""
HELD = 2048
"""Inputs up to which the weights of a program of tensor cores fit into its registers."""
LARGE = 13 * 2**20
"""Bytes of a matrix that takes so long to read that nothing else counts: cuBLAS, or what stands in its place."""


def few_rows_shape(outputs: int, inputs: int, swiglu: bool) -> dict[str, int]:
    """Of a program that sums without tensor cores: what its registers hold of the weights."""
    width = triton.next_power_of_2(inputs) * (2 if swiglu else 1)
    return {"BLOCK_N": max(2 if swiglu else 4, 8192 // width), "num_warps": 8 if width > 4096 else 4}


def some_rows_shape(outputs: int, inputs: int, swiglu: bool) -> dict[str, int]:
    """Of a program that holds its weights for tensor cores, of which each warp sums a part of the inputs."""
    if inputs > 1024:
        return {"BLOCK_N": 16, "SPLITS": 8, "num_warps": 8}
    return {"BLOCK_N": 16 if swiglu else 32, "SPLITS": 16 if swiglu else 4, "num_warps": 4}


def many_rows_shape(rows: int, outputs: int, inputs: int, swiglu: bool) -> dict[str, int]:
    """Of a program of tensor cores that reads as it goes: its part of the product, and how far ahead it fetches."""
    return {
        "BLOCK_M": 16 if rows <= 16 else 64,
        "BLOCK_N": 32 if outputs >= 2048 or rows <= 16 else 16,
        "BLOCK_K": 128 if swiglu else 256,
        "num_warps": 4,
        "num_stages": 4,
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
    pdl: bool = False,
) -> torch.Tensor:
    """``out = residual + act(rms_norm(x) @ weight.T)``, each part where it is asked for.

    Args:
        x: [rows, inputs]; its last dimension is contiguous.
        weight: [outputs, inputs], or with ``swiglu`` [2 * outputs, inputs]: gates first, then what they multiply.
        out: [rows, outputs], or [requests, positions, outputs] for as many rows; its last dimension is contiguous.
        norm: [inputs], the weight of the norm.
        residual: [rows, outputs], may be ``out``.

    Returns:
        ``out``.
    """
    rows, inputs = x.shape
    outputs = out.shape[-1]
    positions = out.shape[1] if out.dim() == 3 else 1
    strides = (out.stride(0), out.stride(1)) if out.dim() == 3 else (out.stride(0), 0)
    small = weight.numel() * weight.element_size() <= LARGE
    held = small and rows <= SOME and inputs <= HELD
    if rows > FEW and norm is not None and not held:
        x, norm = rms_norm(x, norm, eps, pdl=pdl), None
    if rows > FEW and (rows > MANY or not small) and positions == 1 and out.dtype == x.dtype:
        _library_linear(x, weight, out[:, 0] if out.dim() == 3 else out, residual, swiglu, pdl)
        return out
    arguments = (
        x,
        x if norm is None else norm,
        weight,
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
        "RESIDUAL": residual is not None,
        "PDL": pdl,
        **launch_options(pdl),
    }
    if rows <= FEW:
        shape = few_rows_shape(outputs, inputs, swiglu)
        width = triton.next_power_of_2(inputs)
        _few_rows_kernel[(triton.cdiv(outputs, shape["BLOCK_N"]),)](
            *arguments,
            ROWS=triton.next_power_of_2(rows),
            WIDTH=width,
            EVEN=width == inputs and outputs % shape["BLOCK_N"] == 0,
            **shape,
            **parts,
        )
    elif held:
        shape = some_rows_shape(outputs, inputs, swiglu)
        part = triton.cdiv(inputs, shape["SPLITS"])
        _some_rows_kernel[(triton.cdiv(outputs, shape["BLOCK_N"]),)](
            *arguments,
            PART=part,
            WIDTH=max(16, triton.next_power_of_2(part)),
            BLOCK_M=SOME,
            **shape,
            **parts,
        )
    else:
        shape = many_rows_shape(rows, outputs, inputs, swiglu)
        _many_rows_kernel[(triton.cdiv(outputs, shape["BLOCK_N"]), triton.cdiv(rows, shape["BLOCK_M"]))](
            *arguments, **shape, **parts
        )
    return out


def _library_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, swiglu: bool, pdl: bool
) -> None:
    """``fused_linear`` of rows that have been normed, by PyTorch's matrix product."""
    if swiglu:
        product = silu_and_multiply(x @ weight.T, out if residual is None else torch.empty_like(out), pdl=pdl)
        if residual is not None:
            torch.add(residual, product, out=out)
    elif residual is None:
        torch.mm(x, weight.T, out=out)
    else:
        if residual is not out:
            out.copy_(residual)
        out.addmm_(x, weight.T)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False) -> torch.Tensor:
    """Root mean square norm of [rows, width], times ``weight`` [width]."""
    out = torch.empty((len(x), x.shape[1]), dtype=x.dtype, device=x.device)
    width = x.shape[1]
    _rms_norm_kernel[(len(x),)](
        x,
        weight,
        out,
        x.stride(0),
        width,
        eps,
        BLOCK=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def silu_and_multiply(x: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """[rows, 2 * width], contiguous, to ``out`` [rows, width]: the sigmoid-weighted first half times the second."""
    width = out.shape[1]
    block = 1024
    _silu_and_multiply_kernel[(len(x), triton.cdiv(width, block))](
        x, out, out.stride(0), width, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl)
    )
    return out


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a launch needs beside its arguments, to overlap the one before it."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def _rms_norm_kernel(x, weight, out, stride, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(weight + column, mask=column < width, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * stride + column, mask=column < width, other=0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / width + eps) * scale
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _silu_and_multiply_kernel(x, out, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(x + row * 2 * width + column, mask=column < width, other=0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=column < width, other=0).to(tl.float32)
    tl.store(out + row * stride + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _few_rows_kernel(
    x,
    norm,
    weight,
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
            if RESIDUAL:
                total += tl.load(residual + m * residual_stride + n, mask=inside, other=0).to(tl.float32)
            target = out + (m // positions) * out_stride + (m % positions) * position_stride + n
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _some_rows_kernel(
    x,
    norm,
    weight,
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
    SPLITS: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of the weights of a program are in its registers before it waits; inputs are summed in ``SPLITS`` parts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    part, k = tl.arange(0, SPLITS)[:, None, None], tl.arange(0, WIDTH)[None, None, :]
    column = part * PART + k
    within = (k < PART) & (column < inputs)
    inside = n < outputs
    place = n[None, :, None].to(tl.int64) * inputs + column
    w = tl.load(weight + place, mask=inside[None, :, None] & within, other=0)
    if SWIGLU:
        up = tl.load(weight + outputs.to(tl.int64) * inputs + place, mask=inside[None, :, None] & within, other=0)
    if NORM:
        scale = tl.load(norm + column, mask=within, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    a = tl.load(x + m[None, :, None] * x_stride + column, mask=(m < rows)[None, :, None] & within, other=0)
    if NORM:
        wide = a.to(tl.float32)
        factor = tl.rsqrt(tl.sum(tl.sum(wide * wide, axis=2), axis=0) / inputs + eps)[:, None]
        a = (wide * scale).to(w.dtype)
    total = tl.sum(tl.dot(a, tl.permute(w, (0, 2, 1)), input_precision="ieee"), axis=0)
    if NORM:
        total *= factor
    if SWIGLU:
        ups = tl.sum(tl.dot(a, tl.permute(up, (0, 2, 1)), input_precision="ieee"), axis=0)
        if NORM:
            ups *= factor
        total = total * tl.sigmoid(total) * ups
    stored = (m < rows)[:, None] & inside[None, :]
    if RESIDUAL:
        total += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=stored, other=0).to(tl.float32)
    target = out + (m // positions)[:, None] * out_stride + (m % positions)[:, None] * position_stride + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _many_rows_kernel(
    x,
    norm,
    weight,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reads its inputs and its weights a piece ahead of tensor cores; the norm has been done."""
    tl.static_assert(not NORM)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = n < outputs
    begin = tl.where(inside, n, 0)[:, None].to(tl.int64) * inputs
    second = outputs.to(tl.int64) * inputs
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ups = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, inputs, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        within = k < inputs
        a = tl.load(x + m[:, None] * x_stride + k[None, :], mask=(m < rows)[:, None] & within[None, :], other=0)
        w = tl.load(weight + begin + k[None, :], mask=inside[:, None] & within[None, :], other=0)
        total = tl.dot(a, w.T, total, input_precision="ieee")
        if SWIGLU:
            up = tl.load(weight + second + begin + k[None, :], mask=inside[:, None] & within[None, :], other=0)
            ups = tl.dot(a, up.T, ups, input_precision="ieee")
    if SWIGLU:
        total = total * tl.sigmoid(total) * ups
    stored = (m < rows)[:, None] & inside[None, :]
    if RESIDUAL:
        total += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=stored, other=0).to(tl.float32)
    target = out + (m // positions)[:, None] * out_stride + (m % positions)[:, None] * position_stride + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=stored)
