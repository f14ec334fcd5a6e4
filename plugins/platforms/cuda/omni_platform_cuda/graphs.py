"""CUDA graphs: work that is recorded once and replayed, so that its many small kernels are launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
WARM_UPS = 2
"""Runs before recording, in which libraries choose their algorithms and allocate their work space."""


def capture(work: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Record ``work``: what replays it, and what it gave, which every replay overwrites.

    It reads and writes the same tensors each time, and allocates from a pool of the graph's own.
    """
    for _ in range(WARM_UPS):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph.replay, result
