"""A Triton backend for CPUs that compiles nothing: a kernel that nobody replaced says so where it is launched.

vLLM runs Model Runner V2 where Triton is installed and has a backend for the device. All of that runner's kernels
that a token stage launches are replaced (``kernels/``), so the backend only has to exist.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from triton.backends import Backend, backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

FEATURES = {
    "vllm.v1.worker.gpu.spec_decode": "speculative decoding",
    "vllm.v1.worker.gpu.cp_utils": "context parallelism",
    "vllm.v1.worker.gpu.pcp_manager": "prefill context parallelism",
    "vllm.v1.worker.gpu.sample.batch_shard": "batch-sharded sampling",
    "vllm.v1.worker.gpu.sample.thinking_budget": "thinking budgets",
    "vllm.v1.worker.gpu.sample.watermark": "watermarks",
    "vllm.v1.worker.gpu.model_states": "hybrid models with recurrent states",
    "vllm.model_executor.layers.mamba": "layers with recurrent states",
    "vllm.lora": "LoRA",
}
"""What a user asked for when a kernel of that module is launched; the longest prefix that fits counts."""


class UnsupportedOnCpu(NotImplementedError):
    """A feature of vLLM's that the CPU platform does not have."""


def unsupported(kernel: str, feature: str) -> UnsupportedOnCpu:
    """The error for ``feature``, met in the kernel of that qualified name."""
    return UnsupportedOnCpu(
        f"Omni's CPU platform does not support {feature}: kernel {kernel} is not written for it; "
        "turn the feature off, or use a device that Triton compiles for"
    )


def feature_of(kernel: str) -> str:
    """What a kernel of that qualified name is for, in a user's words where they are known."""
    fitting = [prefix for prefix in FEATURES if kernel.startswith(prefix)]
    return FEATURES[max(fitting, key=len)] if fitting else f"what {kernel.rpartition('.')[0]} does with Triton"


def install() -> None:
    """Make Triton know a backend ``cpu``, unless it has a real one."""
    backends.setdefault("cpu", Backend(compiler=NoCompiler, driver=NoDriver))


class NoDriver(DriverBase):
    """A device that is always there."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> NoReturn:
        raise _launched()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class NoCompiler(BaseBackend):
    """Refuses every kernel. Triton asks for a launch's options first, so that is where it ends."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "omni-platform-cpu"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise _launched()

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> NoReturn:
        raise _launched()

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}


def _launched() -> UnsupportedOnCpu:
    """The error for the kernel that is being launched. Triton tells a backend no names, so the stack is asked."""
    frame = inspect.currentframe()
    while frame is not None:
        kernel = frame.f_locals.get("self")
        if isinstance(kernel, JITFunction):
            name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
            return unsupported(name, feature_of(name))
        frame = frame.f_back
    return unsupported("(unknown)", "a kernel of Triton's")
