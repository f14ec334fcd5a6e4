"""The Triton kernel draws what the PyTorch form draws."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from omni_core.ar.sampling import sample_codes

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(autouse=True)
def bounded():
    """Where kernels are interpreted, nothing beyond their tensors may be touched."""
    if DEVICE == "cuda":
        yield
        return
    from omni_core.testing.triton_bounds import within_bounds

    with within_bounds():
        yield


runs = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
ROWS = 8 if DEVICE == "cpu" else 64


def inputs(candidates, *, temperature=0.9, top_k=0, top_p=1.0, rows=ROWS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(candidates)
    logits = (2 * torch.randn(rows, candidates, generator=generator)).to(dtype)
    return [
        one.to(DEVICE)
        for one in (
            logits,
            torch.full((rows,), float(temperature)),
            torch.full((rows,), top_k),
            torch.full((rows,), float(top_p)),
            torch.randint(2**62, (rows,), generator=generator),
            torch.arange(rows) * 17 + 3,
        )
    ]


@runs
@pytest.mark.parametrize("candidates", [37, 300 if DEVICE == "cpu" else 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 5000},
        {"top_p": 0.8},
        {"top_p": 0.001},
        {"top_k": 20, "top_p": 0.5},
    ],
    ids=str,
)
def test_the_kernel_draws_what_pytorch_draws(candidates, dtype, asked):
    from omni_platform_cuda.sampling import sample_codes_kernel

    values = inputs(candidates, dtype=dtype, **asked)
    table = torch.randn(candidates, 24, device=DEVICE)
    codes, rows = sample_codes_kernel(*values, table)
    expected = sample_codes(*values)
    assert (codes == expected).float().mean() >= (1 if dtype == torch.float32 or "top_p" not in asked else 0.95)
    assert torch.equal(rows, table[codes])


@runs
def test_the_kernel_s_rows_differ_by_seed_and_counter():
    from omni_platform_cuda.sampling import sample_codes_kernel

    logits, temperature, top_k, top_p, seeds, counters = inputs(128)
    flat = torch.zeros_like(logits)
    codes, _ = sample_codes_kernel(flat, temperature, top_k, top_p, seeds, counters)
    assert len(set(codes.tolist())) > ROWS / 4
    again, _ = sample_codes_kernel(flat, temperature, top_k, top_p, seeds, counters + 1)
    assert (codes == again).float().mean() < 0.2


@pytest.mark.skipif(DEVICE == "cpu", reason="is within it")
def test_the_kernel_interpreted_on_the_cpu():
    """In a process of its own, since Triton looks for ``TRITON_INTERPRET`` when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
