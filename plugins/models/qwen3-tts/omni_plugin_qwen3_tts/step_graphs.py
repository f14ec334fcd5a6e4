"""Steps of a chunked network with the states of its sessions, on CUDA as graphs: one for each batch size and chunk.

A small chunk is hundreds of short kernels, whose launches take longer than they do. A graph launches them at once. It
reads and writes fixed addresses, so that sessions' states are copied in, and back when it has run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(inputs [batch, chunk, ...], packed [batch, size], positions int64 [batch]) -> outputs [batch, ...]``.

``packed`` is overwritten with the state after the step. Rows do not depend on one another, and shapes alone decide
which kernels run.
"""


@dataclass(frozen=True)
class GraphSettings:
    """Which steps become graphs.

    Attributes:
        buckets: batch sizes, ascending; a batch is padded to the next one, and larger ones run without.
        max_frames: of a padded batch, all chunks together; larger ones spend their time in kernels and need memory.
        max_graphs: how many are kept; each holds its outputs, they share the rest.
    """

    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    max_frames: int = 512
    max_graphs: int = 32


class BatchedStep:
    """Takes a batch of sessions through a step.

    Args:
        step: what computes.
        size: elements of a session's state.
        dtype, device: of the states.
        graphs: ``None`` for none; graphs are for CUDA.
    """

    def __init__(
        self, step: Step, size: int, dtype: torch.dtype, device: torch.device, graphs: GraphSettings | None
    ) -> None:
        self._step, self._size, self._dtype, self._device = step, size, dtype, device
        self.settings = graphs
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self._packed: torch.Tensor | None = None
        self._pool: tuple[int, int] | None = None

    def __call__(self, inputs: torch.Tensor, states: Sequence[torch.Tensor], positions: Sequence[int]) -> torch.Tensor:
        """Run a step and write the new states into ``states``.

        Args:
            inputs: [batch, chunk, ...] on the CPU.
            states: of each session, [size].
            positions: of each session.

        Returns:
            The outputs, [batch, ...] on the device; valid until the next step.
        """
        where = torch.tensor(positions, dtype=torch.int64)
        graph = self._graph(inputs)
        if graph is None:
            packed = torch.stack(list(states))
            outputs = self._step(inputs.to(self._device), packed, where.to(self._device))
        else:
            packed = graph.packed[: len(states)]
            torch.stack(list(states), out=packed)
            outputs = graph.run(inputs, where)
        torch._foreach_copy_(list(states), list(packed.unbind()))
        return outputs

    def _graph(self, inputs: torch.Tensor) -> _Graph | None:
        settings, (batch, chunk) = self.settings, inputs.shape[:2]
        if settings is None or batch > settings.buckets[-1]:
            return None
        bucket = next(size for size in settings.buckets if size >= batch)
        if bucket * chunk > settings.max_frames:
            return None
        if (bucket, chunk) not in self.graphs and len(self.graphs) < settings.max_graphs:
            self.graphs[bucket, chunk] = self._capture(inputs.new_zeros((bucket, *inputs.shape[1:])))
        return self.graphs.get((bucket, chunk))

    def _capture(self, inputs: torch.Tensor) -> _Graph:
        if self._packed is None:
            assert self.settings is not None
            self._packed = torch.zeros(self.settings.buckets[-1], self._size, dtype=self._dtype, device=self._device)
            self._pool = torch.cuda.graph_pool_handle()
        bucket = len(inputs)
        graph = _Graph(
            torch.cuda.CUDAGraph(),
            inputs.to(self._device),
            self._packed[:bucket],
            torch.zeros(bucket, dtype=torch.int64, device=self._device),
        )
        logger.info("recording a graph for a batch of %d and a chunk of %d", bucket, inputs.shape[1])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose and set up their kernels outside the recording
            for _ in range(2):
                self._step(graph.inputs, graph.packed, graph.positions)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph.graph, pool=self._pool):
            graph.outputs = self._step(graph.inputs, graph.packed, graph.positions)
        return graph


@dataclass
class _Graph:
    """A recorded step and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    packed: torch.Tensor
    positions: torch.Tensor
    outputs: torch.Tensor | None = None

    def run(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows behind the batch keep what an earlier one left there; nobody reads what comes of them."""
        batch = len(inputs)
        self.inputs[:batch].copy_(inputs)
        self.positions[:batch].copy_(positions)
        self.graph.replay()
        assert self.outputs is not None
        return self.outputs[:batch]
