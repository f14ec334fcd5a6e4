"""Attention of requests that decode to a paged cache, against PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

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
HEADS, KV_HEADS, DIM, BLOCK, EPS = 4, 2, 16, 8, 1e-6


def rotated(x, norm, position, cos_sin):
    """[heads, dim] as Qwen3 normalises and rotates it."""
    x = F.rms_norm(x, (DIM,), norm, EPS)
    cos, sin = cos_sin[position].chunk(2)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Case:
    """Requests that have so many keys behind them; of the last, which is nobody's, nothing is kept."""

    def __init__(self, contexts, joined):
        generator = torch.Generator().manual_seed(1)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE)

        self.contexts, rows = contexts, len(contexts) + 1
        self.qkv = random(rows, (HEADS + 2 * KV_HEADS) * DIM)
        self.cos_sin = random(max(contexts) + 1, DIM)
        self.norms = 1 + 0.1 * random(DIM), 1 + 0.1 * random(DIM)
        most = max(contexts) // BLOCK + 1
        blocks = rows * most
        order = torch.randperm(blocks, generator=generator).to(DEVICE)
        self.table = order.view(rows, most).int()
        if joined:  # keys and values of a token side by side, heads before tokens
            cache = random(blocks, KV_HEADS, BLOCK, 2 * DIM)
            self.keys, self.values = cache.transpose(1, 2).split(DIM, dim=-1)
        else:
            self.keys, self.values = random(2, blocks, BLOCK, KV_HEADS, DIM).unbind(0)
        self.positions = torch.tensor([*contexts, 0], device=DEVICE)
        where = [int(self.table[row, n // BLOCK]) * BLOCK + n % BLOCK for row, n in enumerate(contexts)]
        self.slots = torch.tensor([*where, -1], device=DEVICE)

    def expected(self, row):
        n = self.contexts[row]
        q, k, v = (x.view(-1, DIM) for x in self.qkv[row].split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]))
        q, k = rotated(q, self.norms[0], n, self.cos_sin), rotated(k, self.norms[1], n, self.cos_sin)
        places = [(int(self.table[row, i // BLOCK]), i % BLOCK) for i in range(n)]
        keys = torch.stack([*(self.keys[place] for place in places), k])
        values = torch.stack([*(self.values[place] for place in places), v])
        y = F.scaled_dot_product_attention(
            q[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], enable_gqa=True
        )
        return y.reshape(-1), k, v


@runs
@pytest.mark.parametrize("joined", [False, True], ids=["vLLM 0.32", "vLLM 0.33"])
@pytest.mark.parametrize("programs", [512, 1], ids=["split", "whole"])
@pytest.mark.parametrize("pdl", [False, True] if DEVICE == "cuda" else [False])
def test_rows_attend_to_what_lies_before_them_and_are_kept(joined, programs, pdl, monkeypatch):
    from omni_speech_codec.attention_kernels import DecodeAttention

    monkeypatch.setattr(DecodeAttention, "PROGRAMS", programs)
    case = Case([0, 1, 63, 64, 65, 150], joined)
    attend = DecodeAttention(HEADS, KV_HEADS, DIM, 8, torch.device(DEVICE))
    expected = [case.expected(row) for row in range(len(case.contexts))]
    for _ in range(2):  # what it joins with must be as it was
        out = torch.full((len(case.qkv), HEADS * DIM), torch.nan, device=DEVICE)
        before = case.keys.clone(), case.values.clone()
        attend(
            case.qkv, case.positions, case.cos_sin, *case.norms, EPS, (case.keys, case.values), case.table, case.slots,
            out, pdl=pdl,
        )  # fmt: skip
        for row, (attended, key, value) in enumerate(expected):
            torch.testing.assert_close(out[row], attended, atol=2e-5, rtol=2e-5)
            place = int(case.slots[row]) // BLOCK, int(case.slots[row]) % BLOCK
            torch.testing.assert_close(case.keys[place], key, atol=1e-6, rtol=1e-5)
            assert torch.equal(case.values[place], value)
            before[0][place], before[1][place] = case.keys[place], case.values[place]
        assert torch.equal(before[0], case.keys) and torch.equal(before[1], case.values)
        assert not out[-1].any()


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
