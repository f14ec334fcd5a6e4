"""vLLM's Triton kernels in PyTorch and NumPy, grouped by what they do.

Conventions, here and in vLLM: a *slot* is a request's fixed place in the runner's state (``req_state_idx``), a *row*
its place in the batch of this step. Every tensor is on the CPU and is written in place. Parameters have the kernels'
names, in which ``_ptr`` means the tensor itself, except where a docstring says that it holds addresses. Strides and
block sizes belong to Triton and are not used: sizes come from the tensors, since a replacement does not learn the
launch grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_REPLACES = "__omni_replaces__"


def replaces(name: str) -> Callable[[F], F]:
    """Mark a function as replacement of the kernel or function with that qualified name in vLLM."""

    def mark(function: F) -> F:
        setattr(function, _REPLACES, name)
        return function

    return mark


def replacements(module: ModuleType) -> Mapping[str, list[Callable[..., Any]]]:
    """What the functions of ``module`` replace: candidates by qualified name, in the order of the source."""
    found: dict[str, list[Callable[..., Any]]] = {}
    for function in vars(module).values():
        name = getattr(function, _REPLACES, None)
        if name is not None and function.__module__ == module.__name__:
            found.setdefault(name, []).append(function)
    return found
