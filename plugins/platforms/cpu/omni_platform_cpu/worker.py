"""vLLM's CPU worker with Omni's diffusion model runner."""

from __future__ import annotations

import os

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from omni_core.vllm.diffusion.worker import DiffusionWorkerMixin


class DiffusionWorker(DiffusionWorkerMixin, CPUWorker):
    """A diffusion stage's worker on CPU.

    ``CPUWorker.init_device`` builds a token model runner itself, so this class has its own.
    """

    def init_device(self) -> None:
        """Set up the process groups and the seed, then the model runner."""
        self.device = torch.device("cpu")
        # Names the shared-memory segments of CPU collectives; the ranks of one engine must agree on it.
        method = self.distributed_init_method
        os.environ["VLLM_DIST_IDENT"] = os.path.basename(method.removeprefix("file://")).split(":")[-1]
        init_worker_distributed_environment(
            self.vllm_config, self.rank, method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        self.model_runner = self.make_diffusion_runner()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the weights; there is no memory pool to allocate them in."""
        self.model_runner.load_model(load_dummy_weights=load_dummy_weights)
