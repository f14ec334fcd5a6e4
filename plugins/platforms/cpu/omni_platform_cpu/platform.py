"""vLLM's CPU platform with Model Runner V2: its kernels in PyTorch and NumPy instead of Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform
else:
    CpuPlatform = resolve_obj_by_qualname(cpu_platform_plugin())  # what vLLM would take here by itself

V1_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
"""One of those that vLLM's CPU platform replaces itself."""


class OmniCpuPlatform(CpuPlatform):
    """The platform that ``entry.vllm_platform`` names. vLLM uses the class, never an instance's state."""

    device_name = "cpu"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """vLLM's own adjustments; with Model Runner V2, asynchronous scheduling stays as configured.

        vLLM switches it off on CPUs because Model Runner V1 gains nothing there. V2 has it on everywhere else, and a
        token stage ought to run here as it runs on the other devices.
        """
        scheduler = vllm_config.scheduler_config
        asynchronous = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        if vllm_config.use_v2_model_runner:
            scheduler.async_scheduling = asynchronous

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace the kernels of both model runners. vLLM calls this in each worker, before the worker's class loads.

        Raises:
            KernelMismatch: this vLLM's kernels are not the ones that the replacements were written for.
        """
        from omni_platform_cpu.registration import RUNNER, is_replaced, register

        if not is_replaced(V1_KERNEL):  # by an earlier worker in this process
            with _without_triton():  # or vLLM would trust in Triton for Model Runner V1 too
                super().register_triton_kernel_overrides()
        register(RUNNER)

    @classmethod
    def get_vit_attn_backend(cls, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer. Vision encoders ask while they are built: their modules are loaded, their kernels known."""
        from omni_platform_cpu.registration import VISION, register

        register(VISION, only_loaded=True)
        return super().get_vit_attn_backend(*args, **kwargs)


@contextmanager
def _without_triton() -> Iterator[None]:
    """Let vLLM believe meanwhile that there is no Triton."""
    from vllm import triton_utils

    had = triton_utils.HAS_TRITON
    triton_utils.HAS_TRITON = False
    try:
        yield
    finally:
        triton_utils.HAS_TRITON = had
