"""vLLM's GPU worker with Omni's diffusion model runner."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from omni_core.vllm.diffusion.runner import DiffusionModelRunner
from omni_core.vllm.diffusion.worker import DiffusionWorkerMixin


class DiffusionWorker(DiffusionWorkerMixin, Worker):
    """A diffusion stage's worker on a CUDA device; device set-up, sleep mode and profiling are vLLM's."""

    def _make_model_runner(self) -> DiffusionModelRunner:
        return self.make_diffusion_runner()
