"""What a worker keeps of its requests, in device tensors with one row each.

A request's row lives longer than its slot in vLLM's runner: a preempted request gives up its slot and comes back in
another, and must find its codes again, since vLLM itself remembers the first of each frame only. A row is given up
when the front end says that the request has ended (``Piece.ended``), which it does with later requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.platform_utils import is_pin_memory_available

from omni_core.ar.messages import Piece, TokenSampling
from omni_core.ar.sampling import CodeSampling

_GREEDY = CodeSampling(temperature=0.0, top_k=0)


@dataclass
class Request:
    """What the host knows of a request.

    Attributes:
        row: where its tensors are.
        piece: the last piece that came.
        prompt: [n, hidden] on the device, or ``None`` when the request has no slot.
    """

    row: int
    piece: Piece
    prompt: torch.Tensor | None = None


class Rows:
    """The rows. The last one belongs to nobody and takes whatever must not be kept.

    Tensors stay where they are, so that recorded graphs may read them, until there are too few rows: then ``on_move``
    is called behind the change. Beside what follows there is a slot more than vLLM has, which is always nobody's.

    Attributes:
        slot_rows: int64 [slots + 1], the row of each slot.
        codes: int16 [rows, frames + 1, code groups]; the last frame takes what is none.
        text: int32 [rows, frames].
        seen: bool [rows, vocabulary], the first codes that a request has drawn.
        integers: int64 [rows, 6]; see ``prompt_length`` and the others.
        reals: float32 [rows, 5].
    """

    INTEGERS = ("prompt_length", "text_length", "seed", "top_k", "token_top_k", "min_frames")
    REALS = ("temperature", "top_p", "token_temperature", "token_top_p", "penalty")

    def __init__(self, num_slots: int, max_frames: int, num_groups: int, vocabulary: int, device: torch.device) -> None:
        self.device = device
        self._pin = device.type != "cpu" and is_pin_memory_available()
        self.max_frames = max_frames
        self.num_slots = num_slots
        self.on_move: Callable[[], None] = lambda: None
        self.requests: dict[str, Request] = {}
        self._free: list[int] = []
        self.codes = torch.zeros(0, max_frames + 1, num_groups, dtype=torch.int16, device=device)
        self.text = torch.zeros(0, max_frames, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocabulary, dtype=torch.bool, device=device)
        self.integers = torch.zeros(0, len(self.INTEGERS), dtype=torch.int64, device=device)
        self.reals = torch.zeros(0, len(self.REALS), dtype=torch.float32, device=device)
        self.slot_rows = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._slot_rows = np.zeros(num_slots + 1, dtype=np.int64)
        self._integers = np.zeros((0, len(self.INTEGERS)), dtype=np.int64)
        self._reals = np.zeros((0, len(self.REALS)), dtype=np.float32)
        self._grow(2 * num_slots)
        self._slot_rows[:] = self.nobody
        self._changed = True
        self.apply()

    def __getattr__(self, name: str) -> torch.Tensor:
        """A setting of all rows, [rows]: a column of ``integers`` or ``reals``."""
        for names, attribute in ((self.INTEGERS, "integers"), (self.REALS, "reals")):
            if name in names:
                columns: torch.Tensor = getattr(self, attribute)
                return columns[:, names.index(name)]
        raise AttributeError(name)

    @property
    def nobody(self) -> int:
        """The last row."""
        return len(self.codes) - 1

    def _grow(self, count: int) -> None:
        """Make ``count`` more rows, and move the last one to the end."""
        old = self.nobody if len(self.codes) else 0
        total = len(self.codes) + count + (0 if len(self.codes) else 1)

        def grown(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_zeros(total, *tensor.shape[1:])
            larger[: len(tensor)] = tensor
            return larger

        for name in ("codes", "text", "seen", "integers", "reals"):
            setattr(self, name, grown(getattr(self, name)))
        neutral = _settings(Piece("", {}, 0, 0, _GREEDY, TokenSampling(0.0, 0, 1.0, 1.0)))
        for name, row in zip(("_integers", "_reals"), neutral, strict=True):
            kept = getattr(self, name)[:old]
            more = np.tile(np.array(row, dtype=kept.dtype), (total - old, 1))
            setattr(self, name, np.concatenate([kept, more]))
        self._slot_rows[self._slot_rows == old] = total - 1
        self._free += range(old, total - 1)
        self._changed = True
        self.on_move()

    def add(self, slot: int, piece: Piece) -> Request:
        """Give the request of ``piece`` the slot; it is new, or comes back, or brings more text."""
        for key in piece.ended:
            self.forget(key)
        request = self.requests.get(piece.key)
        if request is None:
            if not self._free:
                self._grow(self.num_slots)
            request = self.requests[piece.key] = Request(self._free.pop(), piece)
            self.seen[request.row] = False
        text = np.asarray(piece.text[: self.max_frames], dtype=np.int32)
        if len(text):
            self.text[request.row, : len(text)] = torch.from_numpy(text).to(self.device, non_blocking=True)
        request.piece = piece
        self._integers[request.row], self._reals[request.row] = _settings(piece, len(text))
        self._slot_rows[slot] = request.row
        self._changed = True
        return request

    def add_nobody(self, slot: int) -> None:
        """Give the slot to a request that is not kept."""
        self._slot_rows[slot] = self.nobody
        self._changed = True

    def forget(self, key: str) -> None:
        """Give up the row of a request that has ended; one that is not known is fine."""
        if (request := self.requests.pop(key, None)) is not None:
            self._free.append(request.row)

    def apply(self) -> None:
        """Bring what changed to the device, in stream order."""
        if not self._changed:
            return
        self._changed = False
        for tensor, values in (
            (self.slot_rows, self._slot_rows),
            (self.integers, self._integers),
            (self.reals, self._reals),
        ):
            host = torch.from_numpy(values.copy())
            tensor.copy_(host.pin_memory() if self._pin else host, non_blocking=True)


def _settings(piece: Piece, text_length: int = 0) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """What ``Rows.INTEGERS`` and ``Rows.REALS`` name, of a piece."""
    codes, tokens = piece.codes, piece.tokens
    return (
        (piece.prompt_length, text_length, piece.seed, codes.top_k, tokens.top_k, piece.min_frames),
        (codes.temperature, codes.top_p, tokens.temperature, tokens.top_p, tokens.repetition_penalty),
    )
