"""The CUDA platform's choice of attention, and on a GPU FlashAttention against PyTorch's."""

from __future__ import annotations

import logging

import pytest
import torch

from omni_core.errors import ConfigError
from omni_platform_cuda import attention as module


def tensors(queries, keys, heads, head_dim, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, queries, heads, head_dim), (2, keys, heads, head_dim), (2, keys, heads, head_dim)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.bfloat16, 128, None),
        (torch.float16, 256, None),
        (torch.float32, 128, "does not compute in float32"),
        (torch.bfloat16, 12, "does not take heads of 12 channels"),
        (torch.bfloat16, 264, "does not take heads of 264 channels"),
    ],
)
def test_what_flash_attention_cannot_do_is_said(dtype, head_dim, reason):
    found = module.why_not_flash(dtype, head_dim)
    assert found is None if reason is None else found.startswith(reason)


def test_the_default_uses_pytorchs_elsewhere_and_says_so_once(caplog):
    module._choose.cache_clear()
    query, key, value = tensors(5, 3, 2, 12, torch.float32)
    with caplog.at_level(logging.WARNING):
        results = [module.attention(query, key, value) for _ in range(3)]
    assert torch.equal(results[0], module.scaled_dot_product_attention(query, key, value))
    assert [r.getMessage() for r in caplog.records] == [
        "Using PyTorch's attention, since FlashAttention does not compute in float32."
    ]


def test_flash_attention_by_name_does_not_fall_back():
    with pytest.raises(ConfigError, match="'flash-attention' does not compute in float32; choose 'sdpa'"):
        module.flash_attention(*tensors(5, 3, 2, 128, torch.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "head_dim"), [(1333, 1333, 128), (333, 17, 128), (64, 64, 64)])
def test_flash_attention_agrees_with_pytorchs(queries, keys, head_dim, dtype):
    query, key, value = tensors(queries, keys, 4, head_dim, dtype, "cuda")
    exact = module.scaled_dot_product_attention(query.float(), key.float(), value.float())
    result = module.attention(query, key, value)
    assert result.shape == query.shape and result.dtype == dtype
    assert (result.float() - exact).abs().max() < 0.02
    scaled = module.scaled_dot_product_attention(query.float(), key.float(), value.float(), 0.3)
    assert (module.attention(query, key, value, 0.3).float() - scaled).abs().max() < 0.02
