"""Puts the replacements in the place of vLLM's Triton kernels, after comparing their argument lists.

A replacement is a function in ``kernels/`` marked with ``@replaces``. It has the parameters of the kernel, with the
kernel's names and in its order; options of a launch that are no arguments of the kernel are keyword-only. So the
function itself says for which kernel it was written, and a kernel that changed is an error before the first token
instead of wrong tokens. Where versions of vLLM differ, several functions replace one name, and the one that fits is
taken.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_platform_cpu.kernels import replacements

RUNNER = (
    "omni_platform_cpu.kernels.batch",
    "omni_platform_cpu.kernels.blocks",
    "omni_platform_cpu.kernels.inputs",
    "omni_platform_cpu.kernels.logits",
    "omni_platform_cpu.kernels.logprobs",
    "omni_platform_cpu.kernels.sampling",
)
"""The modules with the kernels of Model Runner V2."""

VISION = ("omni_platform_cpu.kernels.vision",)
"""Those with kernels of models, which are replaced once the model's module is loaded."""


class KernelMismatch(RuntimeError):
    """The installed vLLM's kernels are not those that this distribution replaces."""


def register(modules: Sequence[str], *, only_loaded: bool = False) -> None:
    """Replace what the functions of ``modules`` replace, wherever it is not replaced yet.

    ``only_loaded``: leave out kernels whose module is not imported in this process.

    Raises:
        KernelMismatch: a kernel is gone or has other arguments; the message names all of them, and vLLM's version.
    """
    from vllm.triton_utils import dispatcher

    chosen, wrong = {}, []
    for module in modules:
        for name, candidates in replacements(importlib.import_module(module)).items():
            if only_loaded and name.rpartition(".")[0] not in sys.modules:
                continue
            if is_replaced(name):  # by an earlier worker in this process; vLLM would wrap the replacement again
                continue
            try:
                chosen[name] = fitting(name, candidates)
            except KernelMismatch as error:
                wrong.append(str(error))
    if wrong:
        raise KernelMismatch(
            f"Model Runner V2 of vLLM {_version()} is not one that omni-platform-cpu knows; install a vLLM that it "
            f"supports (omni plugins), or run without it (VLLM_USE_V2_MODEL_RUNNER=0): {'; '.join(wrong)}"
        )
    if chosen:
        dispatcher.register_kernels(chosen)


def is_replaced(name: str) -> bool:
    """Whether the kernel of that name in vLLM is replaced in this process."""
    from vllm.triton_utils import dispatcher

    return name in dispatcher._registry


def fitting(name: str, candidates: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The candidate with the arguments of the kernel or function that vLLM has under ``name``.

    Raises:
        KernelMismatch: there is no such kernel, or no candidate fits.
    """
    module, _, attribute = name.rpartition(".")
    try:
        kernel = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise KernelMismatch(f"{name} does not exist ({error})") from error
    have = argument_names(kernel)
    for candidate in candidates:
        if argument_names(candidate) == have:
            return candidate
    known = " or ".join(f"({', '.join(argument_names(candidate))})" for candidate in candidates)
    raise KernelMismatch(f"{name} takes ({', '.join(have)}), not {known}")


def argument_names(function: Any) -> tuple[str, ...]:
    """The names of a kernel's or function's positional arguments, in order."""
    names = getattr(function, "arg_names", None)
    if names is not None:
        return tuple(names)
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    return tuple(name for name, parameter in parameters.items() if parameter.kind != parameter.KEYWORD_ONLY)


def _version() -> str:
    from omni_core.plugins.versions import find_vllm

    return str(find_vllm() or "(unknown)")
