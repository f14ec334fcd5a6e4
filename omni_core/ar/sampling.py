"""Sampling of codes with random numbers that belong to the request: from a counter, never from a generator.

The noise of a candidate is a hash of the request's seed, the frame, the code group and the candidate itself. What is
drawn is therefore the same alone and in any batch, after a preemption, and however the text arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class CodeSampling:
    """How the codes of groups after the first are drawn.

    Attributes:
        temperature: 0 takes the most likely code.
        top_k: how many of the most likely codes are candidates; 0 for all.
        top_p: the least share of probability that the candidates hold together; 1 for all.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"temperature and top_k must be at least 0 and top_p in (0, 1], got {self}")


class SampleCodes(Protocol):
    """Draws one code for each row, and looks up what it is to the next group."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        seeds: torch.Tensor,
        counters: torch.Tensor,
        table: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What ``sample_codes`` gives for the same arguments, and the rows of ``table`` [candidates, width] for it."""


def gumbel_noise(seeds: torch.Tensor, counters: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Gumbel noise for every candidate of every row, float32 [n, num_candidates].

    Args:
        seeds: int64 [n], at least 0.
        counters: int64 [n], below 2^32; a row never uses one twice.
        num_candidates: how many candidates there are.
    """
    # 64 bits for each row, of which one half alone tells a seed's counters apart, and both together tell seeds apart.
    one = _mix(_mix(seeds) ^ counters)
    other = _mix(seeds ^ _mix((seeds >> 32) ^ one))
    candidate = torch.arange(num_candidates, dtype=torch.int64, device=seeds.device)
    bits = _mix((one[:, None] ^ _mix(candidate + 0x9E3779B9)[None, :]) + other[:, None])
    return -torch.log(-torch.log(_uniform(bits)))


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """32 random bits to float32 between 0 and 1: 23 of them, so that neither end is ever reached by rounding."""
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit numbers that spreads every bit over all (``triple32`` of Wellons' hash prospector)."""
    x = x & _MASK
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) & _MASK
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) & _MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _MASK
    return x ^ (x >> 14)


def sample_codes(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """One code per row: the likeliest where the temperature is 0, else a draw among the top-k and top-p candidates.

    As in transformers, top-k comes first, and top-p keeps the smallest set of the likeliest that reaches its share.
    Both keep all that are as likely as the last that they keep.

    Args:
        logits: float [n, candidates].
        temperature: float32 [n].
        top_k: int64 [n], 0 for all.
        top_p: float32 [n], 1 for all.
        seeds: int64 [n].
        counters: int64 [n].

    Returns:
        int64 [n].
    """
    logits = logits.float()
    greedy = logits.argmax(dim=-1)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    last = ordered.gather(1, (top_k.clamp(max=logits.shape[1])[:, None] - 1).clamp(min=0))
    kept = (top_k[:, None] == 0) | (ordered >= last)
    probabilities = ordered.masked_fill(~kept, float("-inf")).softmax(dim=-1)
    above = probabilities.cumsum(dim=-1) - probabilities
    first = torch.cat([torch.ones_like(kept[:, :1]), ordered[:, 1:] < ordered[:, :-1]], dim=-1)
    above = above.masked_fill(~first, 0.0).cummax(dim=-1).values  # that of the first among equals
    kept &= (above < top_p[:, None]) | (top_p[:, None] >= 1)
    noisy = ordered + gumbel_noise(seeds, counters, logits.shape[1]).gather(1, order)
    chosen = noisy.masked_fill(~kept, float("-inf")).argmax(dim=-1, keepdim=True)
    return torch.where(temperature > 0, order.gather(1, chosen)[:, 0], greedy)
