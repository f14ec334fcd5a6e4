"""Fair sharing of a device between running requests of unlike cost.

Each request has a virtual time, the work done for it so far; those furthest behind go next (start-time fair queueing:
Goyal, Vin and Cheng, "Start-Time Fair Queueing", 1997). A small request beside a large one takes many steps for one of
the other, so neither its latency nor the other's grows beyond the share that each is due. Work is counted in the cost
that the family states, not in seconds, so that every rank of a stage decides alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


class FairShare:
    """Virtual times of the requests that are denoising, by request id."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def join(self, request_id: str) -> None:
        """Let a request take part; it begins where those furthest behind are, without credit for its absence."""
        self._times.setdefault(request_id, min(self._times.values(), default=0.0))

    def leave(self, request_id: str) -> None:
        """Forget a request."""
        self._times.pop(request_id, None)

    def choose(self, groups: Mapping[K, Sequence[str]]) -> list[K]:
        """The groups (requests that share a forward) whose turn it is: those with a request that is furthest behind.

        Groups of equal cost stay in step and are chosen together.
        """
        if not groups:
            return []
        behind = {key: min(self._times[request_id] for request_id in ids) for key, ids in groups.items()}
        furthest = min(behind.values())
        return [key for key, time in behind.items() if time <= furthest]

    def charge(self, request_id: str, cost: float) -> None:
        """Count work done for a request."""
        self._times[request_id] += cost
