"""Each kernel beside Triton's interpreter, or beside plain Python where that cannot run it; and their registration."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_core.plugins import manager
from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, PluginManager

HERE = Path(__file__).parent


def oracle_cases() -> list[str]:
    """The names of the cases in ``cpu_oracle.py``."""
    functions = (
        node for node in ast.parse((HERE / "cpu_oracle.py").read_text()).body if isinstance(node, ast.FunctionDef)
    )
    return [f.name for f in functions if any(isinstance(d, ast.Name) and d.id == "case" for d in f.decorator_list)]


@pytest.fixture(scope="module")
def differences() -> dict[str, str]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        PLUGIN_SET_VARIABLE: PluginManager.scan().plugin_set.to_json(),
    }
    answer = subprocess.run(
        [sys.executable, str(HERE / "cpu_oracle.py")], env=environment, capture_output=True, text=True, timeout=500
    )
    assert answer.returncode == 0, answer.stderr[-6000:]
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("RESULTS ")]
    found: dict[str, str] = json.loads(line.removeprefix("RESULTS "))
    return found


@pytest.mark.serve
@pytest.mark.parametrize("case", oracle_cases())
def test_it_does_what_triton_s_interpreter_does(differences, case):
    assert not differences[case], differences[case]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grammar_masks_what_it_forbids(dtype):
    from omni_platform_cpu.kernels.logits import apply_grammar_bitmask

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 100, generator=generator).to(dtype)
    masks = torch.randint(-(2**31), 2**31, (4, 4), generator=generator).int()
    cumulated = torch.tensor([0, 1, 2, 5, 6], dtype=torch.int32)
    places = [(0, 0), (2, 0), (2, 2), (3, 1)]  # the last one is past what its row has
    expected = logits.clone()
    for mask, (row, position) in zip(masks.tolist()[:3], places, strict=False):
        for token in range(100):
            if not mask[token // 32] >> token % 32 & 1:
                expected[int(cumulated[row]) + position, token] = -torch.inf

    indices = torch.tensor([row * 4 + position for row, position in places], dtype=torch.int32)
    apply_grammar_bitmask(logits, 100, indices, cumulated, masks, 4, 100, 4, 8192)
    assert torch.equal(logits, expected)


def test_nans_are_counted():
    from omni_platform_cpu.kernels.logprobs import num_nans

    logits = torch.zeros(3, 10, dtype=torch.bfloat16)
    logits[1, 2:5] = torch.nan
    counts = torch.full((3,), 9, dtype=torch.int32)
    num_nans(logits, 10, counts, 10, 8192)
    assert counts.tolist() == [0, 3, 0]


def test_ranks_and_log_probabilities_of_bfloat16():
    from omni_platform_cpu.kernels.logprobs import ranks, topk_log_softmax

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([[4, 7], [0, 49], [20, 21]])
    found, logprobs = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2)
    ranks(found, logits, 50, tokens[:, 0], 50, 8192)
    topk_log_softmax(logprobs, logits, 50, tokens, 2, 2, 50, 1024, 2)
    assert found.tolist() == [
        sum(other >= row[token] for other in row) for row, token in zip(logits, tokens[:, 0].tolist(), strict=True)
    ]
    assert torch.allclose(logprobs, logits.double().log_softmax(1).gather(1, tokens).float(), atol=1e-5)


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocabulary", [3, 1000, 151936])
def test_ruling_tokens_out_does_not_change_who_wins(vocabulary, scale):
    from omni_platform_cpu.kernels import noise

    draw = np.random.default_rng(0)
    for _ in range(3 if vocabulary > 1000 else 40):
        scores = (scale * draw.standard_normal((5, vocabulary))).astype(np.float32)
        scores[1, vocabulary // 2 :] = -np.inf
        scores[2, 1:] = -np.inf
        scores[3] = -np.inf
        seeds, positions = draw.integers(-(2**62), 2**62, 5).tolist(), draw.integers(0, 9999, 5).tolist()
        prefixes = np.array([noise._prefix(*key) for key in zip(seeds, positions, strict=True)], np.uint32)
        everything = noise.gumbel32(noise._hash(prefixes[:, None], noise._token_keys(vocabulary)))
        assert noise.noisy_argmax(scores, seeds, positions).tolist() == (scores + everything).argmax(1).tolist()


def test_the_noise_is_gumbel_s():
    from omni_platform_cpu.kernels import noise

    keys = noise._token_keys(1 << 18)
    sample = np.sort(noise.gumbel32(noise._hash(np.array([noise._prefix(3, 4)], np.uint32), keys)).astype(np.float64))
    distance = np.abs(np.exp(-np.exp(-sample)) - (np.arange(len(sample)) + 0.5) / len(sample)).max()
    assert distance < 1.63 / np.sqrt(len(sample))  # Kolmogorov and Smirnov, one in a hundred


def test_blocks_outside_of_a_sliding_window_are_nulled():
    """Of vLLM 0.33, which is not the version that the other tests run."""
    from omni_platform_cpu.kernels.blocks import gather_block_tables_in_window

    source = [torch.arange(1, 25, dtype=torch.int32).view(3, 8), torch.arange(51, 75, dtype=torch.int32).view(3, 8)]
    target = [torch.full((3, 8), 99, dtype=torch.int32) for _ in source]
    addresses = [torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64) for tables in (source, target)]
    gather_block_tables_in_window(
        torch.tensor([2, 0], dtype=torch.int32),
        *addresses,
        torch.tensor([8, 8]),
        torch.full((2, 3), 8, dtype=torch.int32),
        3,
        2,
        torch.tensor([5, 0, 39], dtype=torch.int32),
        torch.tensor([0, 16], dtype=torch.int32),
        torch.tensor([16, 8], dtype=torch.int32),
        True,
        1024,
    )
    assert target[0].tolist() == [source[0][2].tolist(), source[0][0].tolist(), [0] * 8]
    # (39 - 16) // 8 = 2 blocks are outside; the other request is still within its window.
    assert target[1].tolist() == [[0, 0, *source[1][2, 2:].tolist()], source[1][0].tolist(), [0] * 8]


def test_drafts_are_kept_by_slot():
    """Of vLLM 0.33 too."""
    from omni_platform_cpu.kernels.batch import post_update_with_drafts

    total, computed = torch.tensor([3, 4, 5], dtype=torch.int32), torch.tensor([2, 3, 4], dtype=torch.int32)
    tokens, kept = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int64)
    post_update_with_drafts(
        torch.tensor([2, -1, 0], dtype=torch.int32),
        computed,
        torch.zeros(3, 1, dtype=torch.int64),
        None,
        0,
        torch.tensor([[7], [8], [9]]),
        1,
        torch.ones(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        tokens,
        8,
        total,
        torch.tensor([[1, 2], [3, 4], [5, 6]]),
        kept,
        2,
    )
    assert kept.tolist() == [[5, 6], [0, 0], [1, 2]]
    assert (total.tolist(), computed.tolist()) == ([4, 4, 6], [3, 3, 5])
    assert (tokens[2, 5], tokens[0, 3]) == (7, 9)


@pytest.fixture
def kernel_module(monkeypatch):
    module = types.ModuleType("kernels_of_another_vllm")

    def kernel(a_ptr, b_ptr, BLOCK_SIZE): ...  # noqa: N803

    module.kernel = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_a_replacement_must_have_the_kernel_s_arguments(kernel_module):
    from omni_platform_cpu.registration import KernelMismatch, fitting

    def old(a_ptr, BLOCK_SIZE): ...  # noqa: N803

    def new(a_ptr, b_ptr, BLOCK_SIZE, *, num_warps=1): ...  # noqa: N803

    name = f"{kernel_module}.kernel"
    assert fitting(name, [old, new]) is new
    with pytest.raises(KernelMismatch, match=r"kernel takes \(a_ptr, b_ptr, BLOCK_SIZE\), not \(a_ptr, BLOCK_SIZE\)"):
        fitting(name, [old])
    with pytest.raises(KernelMismatch, match=r"kernels_of_another_vllm\.gone does not exist"):
        fitting(f"{kernel_module}.gone", [new])


def test_a_changed_kernel_is_one_error_with_vllm_s_version(kernel_module, monkeypatch):
    from omni_platform_cpu import registration

    fake = types.ModuleType("replacements_for_it")

    def replaced(a_ptr): ...

    replaced.__omni_replaces__, replaced.__module__ = f"{kernel_module}.kernel", fake.__name__
    fake.replaced = replaced
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(registration, "is_replaced", lambda name: False)
    with pytest.raises(registration.KernelMismatch, match=r"vLLM .*0\.3\d.*kernel takes \(a_ptr, b_ptr, BLOCK_SIZE\)"):
        registration.register([fake.__name__])


def test_a_plain_process_gets_no_platform(monkeypatch):
    from omni_platform_cpu.entry import vllm_platform

    monkeypatch.setattr(manager, "_manager", None)
    monkeypatch.delenv(PLUGIN_SET_VARIABLE, raising=False)
    assert vllm_platform() is None


def test_features_are_named_for_their_kernels():
    from omni_platform_cpu.triton_backend import feature_of

    assert (
        feature_of("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._rejection_kernel") == "speculative decoding"
    )
    assert feature_of("vllm.v1.worker.gpu.sample.thinking_budget._thinking_budget_kernel") == "thinking budgets"
    assert feature_of("other.ops._kernel") == "what other.ops does with Triton"
