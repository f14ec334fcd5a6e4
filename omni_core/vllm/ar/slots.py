"""What a worker keeps of its requests, in device tensors with one row each.

A request's row lives longer than its slot in vLLM's runner: a preempted request gives up its slot and comes back in
another, and must find its codes again, since vLLM itself remembers the first of each frame only. A row is given up
when the front end says that the request has ended (``Piece.ended``), which it does with later requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from omni_core.ar.messages import Piece
from omni_core.ar.sampling import CodeSampling


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
    """The rows. The last one belongs to nobody and takes whatever must not be kept."""

    def __init__(self, num_slots: int, max_frames: int, num_groups: int, vocabulary: int, device: torch.device) -> None:
        self.device = device
        self.max_frames = max_frames
        self.requests: dict[str, Request] = {}
        self._free: list[int] = []
        self.codes = torch.zeros(0, max_frames + 1, num_groups, dtype=torch.int16, device=device)
        self.text = torch.zeros(0, max_frames, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocabulary, dtype=torch.bool, device=device)
        self._slot_rows = np.zeros(num_slots, dtype=np.int64)
        self._host = np.zeros((0, 7), dtype=np.int64)
        self._grow(2 * num_slots)
        self._slot_rows[:] = self.nobody
        self._changed = True
        self.apply()

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

        self.codes, self.text, self.seen = grown(self.codes), grown(self.text), grown(self.seen)
        neutral = np.array([_settings(0, 0, 0, CodeSampling(temperature=0.0, top_k=0), 1.0)] * (count + 1))
        self._host = np.concatenate([self._host, neutral])[:total]
        self._host[-1] = neutral[0]
        self._slot_rows[self._slot_rows == old] = total - 1
        self._free += range(old, total - 1)
        self._changed = True

    def add(self, slot: int, piece: Piece) -> Request:
        """Give the request of ``piece`` the slot; it is new, or comes back, or brings more text."""
        for key in piece.ended:
            self.forget(key)
        request = self.requests.get(piece.key)
        if request is None:
            if not self._free:
                self._grow(len(self._slot_rows))
            request = self.requests[piece.key] = Request(self._free.pop(), piece)
            self.seen[request.row] = False
        text = np.asarray(piece.text[: self.max_frames], dtype=np.int32)
        if len(text):
            self.text[request.row, : len(text)] = torch.from_numpy(text).to(self.device, non_blocking=True)
        request.piece = piece
        self._host[request.row] = _settings(
            piece.prompt_length, len(text), piece.seed, piece.codes, piece.repetition_penalty
        )
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

        def moved(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.copy()).to(self.device, non_blocking=True)

        host = self._host
        self.slot_rows = moved(self._slot_rows)
        self.prompt_length, self.text_length, self.seed = (moved(host[:, column]) for column in range(3))
        self.temperature = moved(_real(host[:, 3]).astype(np.float32))
        self.top_k = moved(host[:, 4])
        self.top_p = moved(_real(host[:, 5]).astype(np.float32))
        self.penalty = moved(_real(host[:, 6]).astype(np.float32))


def _settings(prompt_length: int, text_length: int, seed: int, codes: CodeSampling, penalty: float) -> tuple[int, ...]:
    """What the host keeps of a row; the bits of numbers that are no integers."""
    temperature, top_p, penalty_bits = np.array([codes.temperature, codes.top_p, penalty]).view(np.int64).tolist()
    return prompt_length, text_length, seed, temperature, codes.top_k, top_p, penalty_bits


def _real(column: np.ndarray) -> np.ndarray:
    """Numbers that were kept by their bits among integers."""
    return np.ascontiguousarray(column).view(np.float64)
