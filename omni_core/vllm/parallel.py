"""vLLM's parallel state in a plain process: for tests and tools that build vLLM layers without an engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)

_SHARED_MEMORY_NAME = "VLLM_DIST_IDENT"
"""vLLM names the shared memory of its CPU collectives after this variable, which its own workers set."""


@contextmanager
def parallel_state(
    rank: int = 0, world_size: int = 1, rendezvous: Path | None = None, backend: str = "gloo"
) -> Iterator[VllmConfig]:
    """Make ``world_size`` processes one tensor-parallel group, with a default ``VllmConfig`` as the current one.

    Args:
        rank: this process's rank.
        world_size: how many processes enter, each with its own rank.
        rendezvous: a file that does not exist yet, the same for all; needed where there are several processes.
        backend: torch.distributed backend.

    Raises:
        RuntimeError: the process already has a parallel state.
        ValueError: several processes without a rendezvous.
    """
    if model_parallel_is_initialized():
        raise RuntimeError("this process already has a parallel state")
    if world_size > 1 and rendezvous is None:
        raise ValueError("several processes need a rendezvous file")
    before = os.environ.get(_SHARED_MEMORY_NAME)
    with tempfile.TemporaryDirectory() as folder:
        meeting = rendezvous or Path(folder) / "rendezvous"
        os.environ[_SHARED_MEMORY_NAME] = f"{meeting.parent.name}-{meeting.name}"
        config = VllmConfig()
        try:
            with set_current_vllm_config(config):
                init_distributed_environment(world_size, rank, f"file://{meeting}", rank, backend)
                initialize_model_parallel(world_size)
                yield config
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
            if before is None:
                del os.environ[_SHARED_MEMORY_NAME]
            else:
                os.environ[_SHARED_MEMORY_NAME] = before
