"""Codes as vLLM's log-probabilities carry them: each with the number of its group, so that no two of a frame are equal.

Where a client is slower than the engine, vLLM joins what waits for it, and on the way makes a dictionary of each
position's tokens, in which equal ones would be one. ``CodesOnly`` spares it that work, and most of the other: lists of
numbers, floats and ranks of each frame's codes cost the front end more than all else that vLLM does for a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_BITS = 15


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 2^15, int64 [n, groups], to int32 [n, groups]; those of group 0 stay as they are."""
    groups = torch.arange(codes.shape[1], dtype=torch.int32, device=codes.device)
    return codes.to(torch.int32) + (groups << _BITS)


def unpack_codes(tokens: Sequence[int] | bytes, num_groups: int) -> npt.NDArray[np.int32]:
    """Tokens of whole frames, one after the other, to codes, int32 [frames, num_groups]; bytes hold them as int32."""
    array = np.frombuffer(tokens, np.int32) if isinstance(tokens, bytes) else np.array(tokens, dtype=np.int32)
    return array.reshape(-1, num_groups) & ((1 << _BITS) - 1)


class Positions:
    """Tokens of positions, in the place of vLLM's ``FlatLogprobs`` and with as much of it as its output processor uses.

    Attributes:
        token_ids: int32 of all positions, one after the other.
    """

    def __init__(self, positions: Sequence[bytes] = ()) -> None:
        self._positions = list(positions)

    @property
    def token_ids(self) -> bytes:
        return b"".join(self._positions)

    def append(self, tokens: bytes) -> None:
        """Add a position."""
        self._positions.append(tokens)

    def extend(self, more: Positions) -> None:
        """Add the positions of ``more``, which come after these."""
        self._positions += more._positions

    def __len__(self) -> int:
        return len(self._positions)

    def __bool__(self) -> bool:
        return True  # so that vLLM takes a slice in any case, and never hands out what is still written to

    def __getitem__(self, which: slice) -> Positions:
        """Take positions out: in deltas none is asked for twice."""
        taken = Positions(self._positions[which])
        del self._positions[which]
        return taken


class CodesOnly:
    """A request's ``LogprobsProcessor`` that keeps the tokens alone, and no longer than until they are handed over.

    Everything else is the processor's own. Only for requests whose outputs are deltas.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.logprobs = Positions()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def update_from_output(self, output: Any) -> None:
        """Take the tokens of an ``EngineCoreOutput``."""
        if output.new_logprobs is not None:
            for tokens in output.new_logprobs.logprob_token_ids:
                self.logprobs.append(tokens.tobytes())


def keep_codes_only(output_processor: Any) -> None:
    """Let vLLM's output processor use ``CodesOnly`` for every request that is added to it from now on."""
    add = output_processor.add_request

    def add_request(request: Any, *arguments: Any, **options: Any) -> None:
        known = request.request_id in output_processor.request_states
        add(request, *arguments, **options)
        if not known:
            state = output_processor.request_states[request.request_id]
            state.logprobs_processor = CodesOnly(state.logprobs_processor)

    output_processor.add_request = add_request
