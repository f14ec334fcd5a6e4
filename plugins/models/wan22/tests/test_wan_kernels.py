"""The fused kernels against the PyTorch form of the same operations, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of values of size 1: some roundings of bfloat16 fall on the other side."""


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def assert_near(actual, expected, dtype):
    difference = (actual.float() - expected.float()).abs()
    assert difference.max() <= TOLERANCE[dtype] * expected.float().abs().max()
    assert difference.mean() <= 0.1 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dim", [96, 3072])
@pytest.mark.parametrize("modulation", [True, False])
@pytest.mark.parametrize("branch", ["none", "plain", "gated"])
def test_residual_norm(parallel, dtype, groups, dim, modulation, branch):
    from omni_plugin_wan22.ops import ResidualNorm

    op = ResidualNorm(1e-6)
    x, added = normal(2, 12, dim, dtype=dtype), normal(2, 12, dim, dtype=dtype, seed=1)
    table = normal(2, groups, 3, dim, seed=2)
    gate, scale, shift = table.split(1, dim=2)
    if not modulation:
        scale, shift = normal(dim, seed=3), normal(dim, seed=4)
    arguments = (
        x,
        None if branch == "none" else added,
        gate if branch == "gated" else None,
        scale,
        shift,
    )
    expected = op.forward_native(*arguments, modulation=modulation)
    actual = op.forward_cuda(*arguments, modulation=modulation)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_near(ours, theirs, dtype)
    other = op.forward_native(*arguments[:3], scale + 0.5, shift, modulation=modulation)
    assert (actual[1].float() - other[1].float()).abs().mean() > 0.1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_gated_add(parallel, dtype, groups):
    from omni_plugin_wan22.ops import GatedAdd

    op = GatedAdd()
    x, branch = normal(2, 8, 96, dtype=dtype), normal(2, 8, 96, dtype=dtype, seed=1)
    gate = normal(2, groups, 6, 96, seed=2)[:, :, 5:]
    assert_near(op.forward_cuda(x, branch, gate), op.forward_native(x, branch, gate), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 12), (24, 128), (40, 128)])
def test_norm_rotate(parallel, dtype, heads, head_dim):
    from omni_plugin_wan22.ops import NormRotate
    from omni_plugin_wan22.transformer import RotaryEmbedding

    op, dim = NormRotate(head_dim, 1e-6), heads * head_dim
    cos, sin = RotaryEmbedding(head_dim).tables((2, 3, 4), torch.device("cuda"))
    qkv = normal(2, 24, 3 * dim, dtype=dtype)
    weights = normal(dim, dtype=dtype, seed=1), normal(dim, dtype=dtype, seed=2)
    expected = op.forward_native(qkv.clone(), *weights, cos, sin)
    actual = op.forward_cuda(qkv.clone(), *weights, cos, sin)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape == (2, 24, heads, head_dim)
        assert_near(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_gelu_within_the_product_is_the_tanh_form(parallel, dtype):
    from omni_plugin_wan22.transformer import FeedForward, TransformerConfig

    with torch.device("cuda"):
        network = FeedForward(TransformerConfig(num_attention_heads=2, attention_head_dim=12, ffn_dim=64), dtype)
    for seed, parameter in enumerate(network.parameters()):
        parameter.data = normal(*parameter.shape, dtype=dtype, seed=seed)
    x = normal(1, 50, 24, dtype=dtype, seed=9)
    expected = torch.nn.functional.gelu(network.up(x), approximate="tanh")
    actual = network._activated(x)
    assert_near(actual, expected, dtype)
    if dtype == torch.float32:
        exact = torch.nn.functional.gelu(network.up(x))
        assert (actual - expected).abs().max() < 0.5 * (actual - exact).abs().max()
