"""Compile Triton kernels for a GPU that is not there.

Triton's interpreter runs a kernel on CPU tensors, but accepts what the compiler refuses, and knows nothing of shared
memory or registers. Within ``compiling`` launches compile and run nothing, so that a test can call a kernel's wrapper
with tensors of genuine shapes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program may have, by compute capability."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        name: of its function.
        shared: bytes of shared memory of a program.
        registers: of a thread.
        spilled: bytes of a thread that found no register, and are stored and loaded from memory.
        warps: of a program.
    """

    name: str
    shared: int
    registers: int
    spilled: int
    warps: int


@dataclass
class Compiled:
    """What was compiled.

    Attributes:
        kernels: of all launches, in order.
    """

    kernels: list[Kernel] = field(default_factory=list)


@contextmanager
def compiling(capability: int = 90) -> Iterator[Compiled]:
    """Launches within compile for NVIDIA GPUs of ``capability`` (90 is Hopper), and leave their outputs as they are.

    Raises:
        triton.compiler.errors.CompilationError: at the launch, with the line at fault.
        AssertionError: a program needs more shared memory than there is.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """As much of a driver as compilation asks for."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    compiled, run = Compiled(), JITFunction.run
    known: dict[str, tuple[int, int]] = {}

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        shared, name = int(kernel.metadata.shared), self.fn.__name__
        if kernel.hash not in known:
            known[kernel.hash] = _registers(kernel.asm["ptx"], capability)
        compiled.kernels.append(Kernel(name, shared, *known[kernel.hash], kernel.metadata.num_warps))
        if shared > SHARED_MEMORY[capability]:
            raise AssertionError(f"{name} needs {shared} bytes of shared memory: {options}")
        return kernel

    before = driver._active
    driver.set_active(Absent())
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before


def _registers(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as the assembler that Triton brings says."""
    said = _assemble(ptx, capability)
    if older := re.search(r"Unsupported .version \S+; current version is '(\S+)'", said):
        said = _assemble(re.sub(r"\.version \S+", f".version {older[1]}", ptx, count=1), capability)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, f"ptxas says: {said}"
    return int(registers[1]), int(spilled[1]) if spilled else 0


def _assemble(ptx: str, capability: int) -> str:
    from triton import knobs

    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [
            knobs.nvidia.ptxas.path,
            "-v",
            f"--gpu-name=sm_{capability}{suffix}",
            source,
            "-o",
            f"{folder}/cubin",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr
