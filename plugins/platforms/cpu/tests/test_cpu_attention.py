"""The CPU platform's attention against the formula."""

from __future__ import annotations

import pytest
import torch

from omni_platform_cpu.attention import attention


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (7, 3), (1, 9)])
def test_it_is_softmax_of_scaled_products(queries, keys, scale):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, queries, 3, 12, generator=generator)
    key, value = (torch.randn(2, keys, 3, 12, generator=generator) for _ in range(2))

    weights = torch.einsum("bqhd,bkhd->bhqk", query, key) * (12**-0.5 if scale is None else scale)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights.softmax(-1), value)

    result = attention(query, key, value, scale)
    assert result.shape == query.shape and result.dtype == query.dtype
    assert (result - expected).abs().max() < 1e-5


def test_the_platform_is_declared():
    from omni_platform_cpu.plugin import omni_platforms

    (platform,) = omni_platforms()
    assert (platform.name, platform.device_type) == ("cpu", "cpu")
    assert platform.stage_defaults["diffusion"] == {"dtype": "float32", "enforce_eager": True}
