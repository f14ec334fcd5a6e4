"""Codes as vLLM's log-probabilities carry them: each with the number of its group, so that no two of a frame are equal.

Where a client is slower than the engine, vLLM joins what waits for it, and on the way makes a dictionary of each
position's tokens, in which equal ones would be one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_BITS = 15


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 2^15, int64 [n, groups], to int32 [n, groups]; those of group 0 stay as they are."""
    groups = torch.arange(codes.shape[1], dtype=torch.int32, device=codes.device)
    return codes.to(torch.int32) + (groups << _BITS)


def unpack_codes(tokens: Sequence[int], num_groups: int) -> npt.NDArray[np.int32]:
    """Tokens of whole frames, one after the other, to codes, int32 [frames, num_groups]."""
    return np.array(tokens, dtype=np.int32).reshape(-1, num_groups) & ((1 << _BITS) - 1)
