"""Kernels that touch what is not theirs are found in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch, triton, triton.language as tl
from triton.runtime.errors import InterpreterError
from omni_core.testing.triton_bounds import within_bounds

@triton.jit
def copy(x, out, count, SIZE: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, SIZE)
    if MASKED:
        tl.store(out + i, tl.load(x + i, mask=i < count), mask=i < count)
    else:
        tl.store(out + i, tl.load(x + i))

x, out = torch.arange(6.0), torch.zeros(6)
with within_bounds():
    copy[(1,)](x, out, 6, SIZE=8, MASKED=True)
    assert torch.equal(x, out)
    for shorter in ((x, torch.zeros(16)), (torch.zeros(16), out)):
        try:
            copy[(1,)](*shorter, 6, SIZE=8, MASKED=False)
        except InterpreterError as error:
            assert "of 2 elements beyond" in str(error), error
            assert "(0, 0, 0)" in str(error), error
        else:
            raise SystemExit("not found")
copy[(1,)](x, torch.zeros(8), 6, SIZE=4, MASKED=False)
print("fine")
"""


def test_reads_and_writes_beyond_tensors_are_found(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "kernel.py"  # Triton reads the source of a kernel
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stdout + done.stderr[-2000:]
