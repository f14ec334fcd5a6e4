"""Kernels of decoders that take few rows, against PyTorch, and the code predictor made of them."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

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


@pytest.fixture(autouse=True, scope="module")
def seeded():
    torch.manual_seed(0)


@runs
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 96, 48), (2, 128, 64), (3, 96, 48), (16, 128, 64), (40, 96, 48), (70, 128, 64)]
)
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("pdl", [False, True] if DEVICE == "cuda" else [False])
def test_a_linear_layer_with_all_that_goes_with_it(rows, inputs, outputs, swiglu, pdl):
    from omni_speech_codec.decode_kernels import fused_linear

    def random(*shape):
        return torch.randn(*shape, device=DEVICE)

    x, weight, norm = random(rows, inputs), random(outputs * (2 if swiglu else 1), inputs) / 8, 1 + random(inputs) / 9
    residual = random(rows, outputs)
    expected = F.rms_norm(x, (inputs,), norm, 1e-6) @ weight.T
    if swiglu:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    out = torch.empty_like(residual)
    fused_linear(x, weight, out, norm=norm, eps=1e-6, residual=residual, swiglu=swiglu, pdl=pdl)
    torch.testing.assert_close(out, expected + residual, atol=2e-5, rtol=2e-5)
    fused_linear(x, weight, out, norm=norm, eps=1e-6, residual=out.copy_(residual), swiglu=swiglu, pdl=pdl)
    torch.testing.assert_close(out, expected + residual, atol=2e-5, rtol=2e-5)
    fused_linear(x, weight[:outputs], out, pdl=pdl)
    torch.testing.assert_close(out, x @ weight[:outputs].T, atol=2e-5, rtol=2e-5)


@runs
def test_rows_can_be_positions_of_requests():
    from omni_speech_codec.decode_kernels import fused_linear

    x, weight = torch.randn(6, 32, device=DEVICE), torch.randn(16, 32, device=DEVICE)
    out = torch.zeros(3, 5, 16, device=DEVICE)
    fused_linear(x, weight, out[:, 1:3])
    torch.testing.assert_close(out[:, 1:3].reshape(6, 16), x @ weight.T, atol=2e-5, rtol=2e-5)
    assert not out[:, 0].any() and not out[:, 3:].any()


CONFIG = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_code_groups": 5, "vocab_size": 40, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0},
}  # fmt: skip


def predictor(talker_hidden):
    from omni_speech_codec.code_predictor import CodePredictorModel

    generator = torch.Generator().manual_seed(3)
    model = CodePredictorModel(SimpleNamespace(**CONFIG), talker_hidden).requires_grad_(False)
    for parameter in model.parameters():
        size = parameter.shape[-1] if parameter.dim() > 1 else 100
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / size**0.5 + (parameter.dim() == 1))
    return model.to(DEVICE)


@runs
@pytest.mark.parametrize(("talker_hidden", "count"), [(64, 1), (48, 3), (64, 17)])
@pytest.mark.parametrize("pdl", [False, True] if DEVICE == "cuda" else [False])
def test_the_predictor_s_logits(talker_hidden, count, pdl):
    from omni_speech_codec.fused_predictor import FusedCodePredictor

    model = predictor(talker_hidden)
    first_table = torch.randn(50, talker_hidden, device=DEVICE)
    hidden, first = torch.randn(count, talker_hidden, device=DEVICE), torch.arange(count, device=DEVICE) + 7
    logits = {"plain": [], "fused": []}

    def choosing(name):
        def choose(scores, group, table):
            logits[name].append(scores.clone())
            codes = (torch.arange(count, device=DEVICE) * 5 + group * 7) % CONFIG["vocab_size"]
            return codes, table[codes]

        return choose

    expected = model(hidden, first, first_table[first], choosing("plain"))
    found = FusedCodePredictor(model, first_table, pdl=pdl)(hidden, first, choosing("fused"))
    assert torch.equal(found, expected)
    assert len(logits["fused"]) == CONFIG["num_code_groups"] - 1
    for one, other in zip(logits["fused"], logits["plain"], strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
    assert (logits["fused"][0] - logits["fused"][1]).abs().max() > 0.1


@pytest.mark.skipif(DEVICE == "cpu", reason="is within it")
def test_the_kernels_interpreted_on_the_cpu():
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
