"""Find reads and writes of a Triton kernel beyond its tensors, in Triton's interpreter.

On a GPU they are errors that name no line, or silent; in the interpreter they read whatever lies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class OutOfBounds(AssertionError):
    """A kernel touched memory that none of its arguments has."""


@contextmanager
def within_bounds() -> Iterator[None]:
    """Kernels that run within, with ``TRITON_INTERPRET=1``, may touch their arguments' storages alone.

    Raises:
        OutOfBounds: at the launch, wrapped in Triton's ``InterpreterError``; says how far off, and the program.
    """
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    executor = interpreter.GridExecutor
    load, store, arguments = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    allowed: list[tuple[int, int]] = []

    def remember(self: Any, args: Any, kwargs: Any) -> Any:
        found = arguments(self, args, kwargs)
        storages = [one.untyped_storage() for one in found[0] if hasattr(one, "untyped_storage")]
        allowed[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return found

    def check(self: Any, what: str, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.asarray(pointers.data).astype(np.int64)
        if mask is not None:
            addresses = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, np.shape(mask.data)))
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        fine = np.zeros(addresses.shape, dtype=bool)
        for begin, end in allowed:
            fine |= (addresses >= begin) & (addresses + size <= end)
        if not fine.all():
            one = int(addresses[~fine].flat[0])
            nearest = min(allowed, key=lambda each: min(abs(one - each[0]), abs(one - each[1])))
            raise OutOfBounds(
                f"a {what} of {(~fine).sum()} elements beyond all arguments, in program {self.grid_idx}: the first is "
                f"{one - nearest[0]} bytes after the begin of the nearest, which has {nearest[1] - nearest[0]}"
            )

    def checked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        check(self, "read", ptrs, mask)
        return load(self, ptrs, mask, other, *rest)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(self, "write", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor._init_args_hst = remember
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor._init_args_hst = arguments
