"""A kernel that Triton's interpreter runs and its compiler refuses."""

from __future__ import annotations

from vllm.triton_utils import tl, triton


@triton.jit
def changes_shape(x, flag):
    value = tl.load(x + tl.arange(0, 4))
    if flag > 1:
        value = tl.sum(value)
    tl.store(x, tl.sum(value))
