"""The runner's random numbers: Gumbel noise from a hash of seed, position and token id, the same bits as vLLM's kernel.

Sampling by Gumbel noise takes the largest of ``logit + noise``. A token's noise depends on nothing but the request's
seed, the position and the token, so it does not matter what else is in the batch.

Of a large vocabulary nearly every token can be ruled out with a bound on its noise that needs no logarithm;
``noisy_argmax`` computes the noise itself only for those few that may win.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Uint32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]

MASK = 0xFFFFFFFF
FP64_DOMAIN = 0x9E3779B9
"""What the hash starts from for the upper half of the bits of a float64 number (vLLM: ``murmur3_uniform64``)."""

BLOCK = 1 << 15
"""How many numbers are hashed at once: a few arrays of that size stay in a core's second-level cache."""

SPARSE = 8
"""Where at most one token in so many is left, hash only these."""

_LN2 = math.log(2)
_BITS_TO_LN = np.float32(_LN2 * 2.0**-23)
_BOUND = _LN2 * (127 + 31)
_ONE = np.uint32(1)


def noisy_argmax(
    scores: Float32, seeds: list[int], positions: list[int], *, fp64: bool = False
) -> npt.NDArray[np.int64]:
    """The token that wins in each row: the first of the largest ``scores + noise``.

    Args:
        scores: float32 [N, vocabulary], logits divided by the temperature; -inf for tokens that are masked out.
        seeds: 64 bits for each row.
        positions: a position for each row.
        fp64: draw the noise and compare in float64.
    """
    rows, vocabulary = scores.shape
    winners = np.empty(rows, np.int64)
    together = max(1, BLOCK // vocabulary)
    for first in range(0, rows, together):
        part = slice(first, first + together)
        keys = list(zip(seeds[part], positions[part], strict=True))
        winners[part] = _argmax(scores[part], keys, fp64)
    return winners


def _argmax(scores: Float32, keys: list[tuple[int, int]], fp64: bool) -> npt.NDArray[np.int64]:
    """``noisy_argmax`` of a few rows with their seeds and positions."""
    prefixes = [_prefix(*key) for key in keys]
    left = scores > -np.inf
    if fp64 or np.count_nonzero(left) * SPARSE <= left.size:
        rows, columns = _where(left)
    else:
        rows, columns = _contenders(scores, prefixes)
        if np.array_equal(rows, np.arange(len(scores))):  # one in each row
            return columns
    tokens = _token_keys(scores.shape[1])[columns]
    bits = _hash(np.array(prefixes, np.uint32)[rows], tokens)
    if fp64:
        upper = np.array([_prefix(*key, FP64_DOMAIN) for key in keys], np.uint32)
        noisy = scores[rows, columns] + gumbel64(bits, _hash(upper[rows], tokens))
    else:
        noisy = scores[rows, columns] + gumbel32(bits)
    winners = np.zeros(len(scores), np.int64)  # 0 where everything is masked, as the kernel has it
    bounds = np.searchsorted(rows, np.arange(len(scores) + 1))
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end > start:
            winners[row] = columns[start + noisy[start:end].argmax()]
    return winners


def _contenders(scores: Float32, prefixes: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns, in order, of every token that may win; at least one in each row without NaNs.

    The noise is -log(-log(1 - u)) of a uniform u, and so at most -log(u), which the bits of u as a float bound from
    above: log2(2**e * (1 + m)) >= e + m. What stays below the true score of the row's best bound cannot win.
    """
    bound = np.empty_like(scores)
    keys = _token_keys(scores.shape[1])
    start = np.array(prefixes, np.uint32)[:, None]
    for first in range(0, scores.shape[1], BLOCK):
        part = slice(first, first + BLOCK)
        bits = _hash(start, keys[part])
        bits >>= _ONE  # NumPy converts int32 to float faster than uint32; a lower u only loosens the bound
        uniform = bits.view(np.int32).astype(np.float32)
        logarithm = uniform.view(np.int32).astype(np.float32)
        logarithm *= _BITS_TO_LN
        np.subtract(scores[:, part], logarithm, out=bound[:, part])
    best = bound.argmax(1)
    least = [_score(row, token, prefix) for row, token, prefix in zip(scores, best.tolist(), prefixes, strict=True)]
    return _where(bound >= np.array(least, np.float32)[:, None])


def _where(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``mask.nonzero()`` of two dimensions, which NumPy is slow at."""
    places = np.flatnonzero(mask)
    return np.divmod(places, mask.shape[1])


def _score(scores: Float32, token: int, prefix: int) -> float:
    """What the bound of a token must reach to win against ``token``, less what rounding to float32 may take away."""
    u = (_finished(prefix ^ int(_token_keys(len(scores))[token])) + 0.5) * 2.0**-32
    score = float(scores[token]) - math.log(-math.log1p(-u))
    return score - _BOUND - 1e-5 * (abs(score) + 100) if math.isfinite(score) else -math.inf


def gumbel32(bits: Uint32) -> Float32:
    """Gumbel noise from 32 random bits each, operation by operation as vLLM's ``gumbel_noised_argmax``."""
    one = np.float32
    u = (bits >> np.uint32(16)).astype(np.float32) * one(1.52587890625e-05)
    u += ((bits & np.uint32(0xFFFF)).astype(np.float32) + one(0.5)) * one(2.3283064365386963e-10)
    series = one(1 / 8)
    for divisor in range(7, 0, -1):
        series = one(1 / divisor) + u * series
    direct = np.log(np.maximum(one(1) - u, one(5.960464477539063e-08)))
    noise: Float32 = -np.log(-np.where(u < one(0.25), -u * series, direct))
    return noise


def gumbel64(low: Uint32, high: Uint32) -> npt.NDArray[np.float64]:
    """Gumbel noise from 64 random bits each, of which 53 count (vLLM: ``murmur3_uniform64``)."""
    step = 1.1102230246251565e-16
    u = (((high.astype(np.uint64) << np.uint64(32)) | low) >> np.uint64(11)).astype(np.float64) + 0.5
    u *= step
    noise: npt.NDArray[np.float64] = -np.log(-np.log(np.where(u == 1.0, u - step, u)))
    return noise


# The hash is Murmur3 (32 bits) of seed, position and token id, in this order: the words of a request first, in Python
# integers, then the token's for the whole vocabulary. The last step of mixing a word in is a rotation by 13, and
# rotating distributes over xor, so that a token's part of it is made once.


def _prefix(seed: int, position: int, domain: int = 0) -> int:
    """What precedes the token id, mixed in and rotated by 13."""
    h = domain
    for word in (seed & MASK, seed >> 32 & MASK):
        h = (_rotated(h ^ _scrambled(word), 13) * 5 + 0xE6546B64) & MASK
    h = (_rotated(h ^ _scrambled(position & MASK), 13) * 5 + 0xE6546B64) & MASK
    return _rotated(h, 13)


def _scrambled(word: int) -> int:
    return _rotated(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & MASK


@lru_cache(maxsize=4)
def _token_keys(vocabulary: int) -> Uint32:
    """Every token id, scrambled and rotated by 13: uint32 [vocabulary]."""
    words = np.arange(vocabulary, dtype=np.uint32) * np.uint32(0xCC9E2D51)
    words = (words << np.uint32(15) | words >> np.uint32(17)) * np.uint32(0x1B873593)
    return words << np.uint32(13) | words >> np.uint32(19)


def _finished(h: int) -> int:
    """The hash of prefix xor token key, as a Python integer."""
    h = (h * 5 + 0xE6546B64 & MASK) ^ 16  # the length in bytes
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


_FIVE, _ADDEND, _LENGTH = np.uint32(5), np.uint32(0xE6546B64), np.uint32(16)
_FIRST, _SECOND, _THIRTEEN, _SIXTEEN = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(13), np.uint32(16)


def _hash(prefixes: Uint32, keys: Uint32) -> Uint32:
    """``_finished`` of many: prefixes and token keys broadcast to a new uint32 array."""
    h = prefixes ^ keys
    h *= _FIVE
    h += _ADDEND
    h ^= _LENGTH
    other = h >> _SIXTEEN
    h ^= other
    h *= _FIRST
    np.right_shift(h, _THIRTEEN, out=other)
    h ^= other
    h *= _SECOND
    np.right_shift(h, _SIXTEEN, out=other)
    h ^= other
    return h
