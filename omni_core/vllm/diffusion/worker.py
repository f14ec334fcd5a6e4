"""The part of a diffusion worker that is the same on every platform: a mixin over one of vLLM's worker classes.

A platform plugin combines it with the worker class of its hardware, and makes the model runner where that class
makes its own.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import CompilationTimes

from omni_core.vllm.diffusion.output import RunnerStats
from omni_core.vllm.diffusion.runner import DiffusionModelRunner


class DiffusionWorkerMixin:
    """Switches off what concerns key-value caches and token models; put it before vLLM's worker class."""

    vllm_config: Any
    device: Any
    rank: int
    model_runner: DiffusionModelRunner

    def make_diffusion_runner(self) -> DiffusionModelRunner:
        """The model runner of this worker; ``self.device`` must be set."""
        return DiffusionModelRunner(self.vllm_config, self.device, self.rank)

    def determine_available_memory(self) -> int:
        return 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """There is no key-value cache."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_dummy_batch(self) -> None:
        """Nothing to keep in step with."""

    def omni_stats(self, reset: bool = False) -> dict[str, Any]:
        """Counters of this worker; for ``collective_rpc``."""
        runner = self.model_runner
        stats = runner.stats
        if reset:
            runner.stats = RunnerStats()
        return {**stats.to_dict(), "running": len(runner.running)}
