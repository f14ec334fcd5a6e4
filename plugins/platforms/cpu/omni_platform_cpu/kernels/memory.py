"""Arrays at addresses: block tables and prompt embeddings reach the kernels as numbers in uint64 tensors."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch


@lru_cache(maxsize=256)
def int32_at(address: int, rows: int, columns: int) -> npt.NDArray[np.int32]:
    """An int32 array ``[rows, columns]`` at an address. It owns nothing: the caller knows that the memory lives."""
    memory = (ctypes.c_int32 * (rows * columns)).from_address(address)
    return np.frombuffer(memory, dtype=np.int32).reshape(rows, columns)


def tensor_at(address: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor ``[rows, columns]`` of any dtype at an address; it owns nothing either."""
    memory = (ctypes.c_byte * (rows * columns * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)
