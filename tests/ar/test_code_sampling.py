"""Draws of codes: what transformers would draw from, by noise that repeats for its request and for nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_core.ar.sampling import CodeSampling, _uniform, gumbel_noise, sample_codes


def draw(logits, count, *, temperature=1.0, top_k=0, top_p=1.0, first_seed=0, counter=3):
    """``count`` draws from the same logits, each with a seed of its own."""
    return sample_codes(
        logits.expand(count, -1),
        torch.full((count,), float(temperature)),
        torch.full((count,), top_k),
        torch.full((count,), float(top_p)),
        torch.arange(first_seed, first_seed + count),
        torch.full((count,), counter),
    )


def warped(logits, temperature, top_k, top_p):
    """The probabilities that transformers samples from."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    return TopPLogitsWarper(top_p)(None, scores)[0].softmax(dim=-1).numpy()


def surprise(counts, probabilities):
    """How many standard deviations chi-square lies above its mean; cells that expect fewer than 8 are joined."""
    expected = probabilities / probabilities.sum() * counts.sum()
    large = expected >= 8
    cells = [*zip(counts[large], expected[large], strict=True)]
    if expected[~large].sum() >= 8:
        cells.append((counts[~large].sum(), expected[~large].sum()))
    statistic = sum((observed - mean) ** 2 / mean for observed, mean in cells)
    freedom = len(cells) - 1
    assert freedom > 2
    return (statistic - freedom) / math.sqrt(2 * freedom)


DRAWS = 12_000
LOGITS = 1.5 * torch.randn(128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.9, 50, 1.0), (1.3, 0, 0.8), (0.9, 20, 0.7)]
)
def test_draws_have_transformers_distribution(temperature, top_k, top_p):
    codes = draw(LOGITS, DRAWS, temperature=temperature, top_k=top_k, top_p=top_p)
    counts = np.bincount(codes.numpy(), minlength=len(LOGITS))
    probabilities = warped(LOGITS, temperature, top_k, top_p)
    assert not counts[probabilities == 0].any(), "drawn from beyond the candidates"
    assert surprise(counts, probabilities) < 5
    assert surprise(counts, np.roll(probabilities, 1)) > 100, "the test would notice another distribution"


@pytest.mark.parametrize("vary", ["seeds", "counters"])
def test_draws_of_one_request_have_it_too(vary):
    many, one = torch.arange(DRAWS), torch.full((DRAWS,), 12345)
    codes = sample_codes(
        LOGITS.expand(DRAWS, -1),
        torch.ones(DRAWS),
        torch.zeros(DRAWS, dtype=torch.int64),
        torch.ones(DRAWS),
        *((many, one) if vary == "seeds" else (one, many)),
    )
    assert surprise(np.bincount(codes.numpy(), minlength=len(LOGITS)), LOGITS.softmax(dim=-1).numpy()) < 5


@given(
    seed=st.integers(0, 2**62 - 1),
    counter=st.integers(0, 2**20),
    size=st.integers(2, 64),
    temperature=st.floats(0.05, 3),
    top_k=st.integers(0, 80),
    top_p=st.floats(0.01, 1),
    coarse=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_only_transformers_candidates_are_drawn(seed, counter, size, temperature, top_k, top_p, coarse):
    logits = 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed % 2**32))
    logits = logits.round() if coarse else logits  # with equal ones, as bfloat16 has many
    seeds, counters = torch.tensor([seed]), torch.tensor([counter])
    code = sample_codes(
        logits[None], torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), seeds, counters
    )
    # Rounding may move the border of top-p; and which ones of equal candidates at it are kept, neither says.
    candidates = warped(logits, temperature, min(top_k, size), min(1.0, top_p + 1e-4)) > 0
    assert logits[code] >= logits[candidates].min()


def test_candidates_that_are_as_likely_as_the_last_are_kept():
    logits = torch.tensor([5.0, 4.0, 4.0, 4.0, 1.0])
    assert set(draw(logits, 500, top_k=2).tolist()) == {0, 1, 2, 3}


def test_a_temperature_of_0_and_one_candidate_take_the_likeliest():
    likeliest = int(LOGITS.argmax())
    assert set(draw(LOGITS, 50, temperature=0).tolist()) == {likeliest}
    assert set(draw(LOGITS, 50, top_k=1).tolist()) == {likeliest}
    assert set(draw(LOGITS, 50, top_p=1e-6).tolist()) == {likeliest}
    assert set(draw(LOGITS, 50, temperature=1e-30).tolist()) == {likeliest}


def test_a_row_s_draw_does_not_depend_on_the_others():
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    seeds, counters = torch.arange(64) * 7919, torch.arange(64) % 5
    settings = (torch.linspace(0, 2, 64), torch.arange(64) % 9 * 10, torch.linspace(0.1, 1, 64))
    together = sample_codes(logits, *settings, seeds, counters)
    rows = [
        sample_codes(logits[i : i + 1], *(s[i : i + 1] for s in settings), seeds[i : i + 1], counters[i : i + 1])
        for i in range(64)
    ]
    assert torch.equal(together, torch.cat(rows))


# The noise


def test_noise_is_gumbel_and_finite():
    noise = gumbel_noise(torch.arange(500), torch.arange(500) % 7, 2048).flatten()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 0.006 and abs(noise.std() - math.pi / math.sqrt(6)) < 0.006
    uniform = (-(-noise.double()).exp()).exp()
    counts = np.histogram(uniform.numpy(), bins=512, range=(0, 1))[0]
    assert surprise(counts, np.ones(512)) < 5


def test_neither_end_is_reached():
    ends = _uniform(torch.tensor([0, 2**32 - 1]))
    assert 0 < ends[0] < 1e-7 and 1 - 1e-7 < ends[1] < 1
    assert torch.isfinite(torch.log(-torch.log(ends))).all()


def test_noise_repeats_and_depends_on_everything():
    def noise(seed, counter):
        return gumbel_noise(torch.tensor([seed]), torch.tensor([counter]), 256)[0]

    assert torch.equal(noise(5, 9), noise(5, 9))
    others = [(6, 9), (5, 10), (9, 5), (5 + 2**32, 9), (5 + 2**61, 9), (4, 9), (5, 9 + 2**31)]
    for other in others:
        assert (noise(5, 9) == noise(*other)).float().mean() < 0.02


def test_no_two_rows_share_their_noise():
    seeds = torch.cat([torch.arange(1000), torch.arange(1000) << 32, torch.arange(1000) << 45])
    counters = torch.arange(16).repeat(len(seeds))
    noise = gumbel_noise(seeds.repeat_interleave(16), counters, 8)
    keys = {row.tobytes() for row in noise.numpy()}
    distinct = {(int(s), int(c)) for s, c in zip(seeds.repeat_interleave(16), counters, strict=True)}
    assert len(keys) == len(distinct)


@pytest.mark.parametrize("step", [1, 2, 3, 16, 2**16, 2**32, 2**32 + 1])
@pytest.mark.parametrize("of", ["seeds", "counters", "candidates"])
def test_neighbours_are_not_correlated(of, step):
    if of == "seeds":
        one, other = (gumbel_noise(torch.arange(100) + shift, torch.full((100,), 4), 512) for shift in (0, step))
    elif of == "counters":
        step %= 2**32
        one, other = (gumbel_noise(torch.full((100,), 4), torch.arange(100) + shift, 512) for shift in (0, step or 5))
    else:
        step %= 256
        noise = gumbel_noise(torch.arange(100), torch.full((100,), 4), 512 + (step or 5))
        one, other = noise[:, :512], noise[:, (step or 5) :]
    correlation = float(np.corrcoef(one.flatten(), other.flatten())[0, 1])
    assert abs(correlation) < 5 / math.sqrt(one.numel())


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0}]
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="temperature and top_k must be at least 0"):
        CodeSampling(**bad)
