"""Steps of sessions in slots on CUDA: chunks of any length, as recorded graphs of a few lengths and batch sizes.

A step is a hundred short kernels, whose launches take longer than they do. A graph launches them at once, from fixed
addresses: the codes and which slots they are for are copied to those, and the samples from there. All graphs are
recorded when the decoder is loaded and share their memory, since they run one after the other on a stream of their own.
Nothing here waits for more than that stream, so that others may use the device from other threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_speech_codec import fused_ops
from omni_speech_codec.fused_network import FusedNetwork
from omni_speech_codec.fused_ops import Where

logger = logging.getLogger(__name__)

NOBODY = 0
"""The slot of rows that fill up a batch."""
SLOT_AND_POSITION = 2
"""Numbers of a row beside its codes."""


@dataclass(frozen=True)
class GraphSettings:
    """Which steps are recorded.

    Attributes:
        buckets: batch sizes, ascending; a batch is filled up to the next one, and a larger one is split.
        chunks: numbers of frames, ascending from 1; another number is several steps.
    """

    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    chunks: tuple[int, ...] = (1, 2, 4, 8, 16)


class SlotDecoder:
    """Decodes for sessions in slots of a network.

    Args:
        network: with one slot more than there can be sessions: ``NOBODY`` is not theirs.
        settings: sizes of steps.
        graphs: whether they are recorded, for CUDA; they are the same steps otherwise.
    """

    def __init__(self, network: FusedNetwork, settings: GraphSettings, *, graphs: bool) -> None:
        self.network, self.settings, self.device = network, settings, network.device
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda else None
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        rows, frames = settings.buckets[-1], settings.chunks[-1]
        self._begin = rows * SLOT_AND_POSITION  # slots, positions, then codes: addresses do not depend on the batch
        size = self._begin + rows * frames * network.groups
        self._inputs = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._out = torch.zeros(rows * frames * network.samples_per_frame, dtype=torch.float32, device=self.device)
        if cuda:
            torch.cuda.current_stream(self.device).synchronize()  # weights are there, whatever stream brought them
        if graphs:
            self._record()

    def __call__(
        self, codes: npt.NDArray[np.integer], slots: Sequence[int], positions: Sequence[int], *, silent: bool = False
    ) -> npt.NDArray[np.float32] | None:
        """Take sessions one chunk further.

        Args:
            codes: [batch, frames, groups], each below the size of a codebook.
            slots: of each session, none twice, none ``NOBODY``.
            positions: frames that each has behind it.
            silent: the samples are not wanted.

        Returns:
            [batch, frames * samples_per_frame], in memory of its own; ``None`` for ``silent``.
        """
        if self.stream is None:
            return self._decode(codes, slots, positions, silent)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            return self._decode(codes, slots, positions, silent)

    def _decode(
        self, codes: npt.NDArray[np.integer], slots: Sequence[int], positions: Sequence[int], silent: bool
    ) -> npt.NDArray[np.float32] | None:
        most, parts = self.settings.buckets[-1], []
        for first in range(0, len(codes), most):
            few, begin = slice(first, first + most), 0
            row: list[torch.Tensor] = []
            for chunk in self._chunks(codes.shape[1]):
                now = [position + begin for position in positions[few]]
                row.append(self._step(codes[few, begin : begin + chunk], slots[few], now, silent))
                begin += chunk
            parts.append(row)
        if silent:
            return None
        if self.stream is not None:
            done = torch.cuda.Event()
            done.record(self.stream)
            done.synchronize()
        rows = [_joined([part.numpy() for part in row], axis=1) for row in parts]
        return _joined(rows, axis=0)

    def _chunks(self, frames: int) -> Iterator[int]:
        while frames:
            chunk = max(size for size in self.settings.chunks if size <= frames)
            yield chunk
            frames -= chunk

    def _step(
        self, codes: npt.NDArray[np.integer], slots: Sequence[int], positions: Sequence[int], silent: bool
    ) -> torch.Tensor:
        """Queue a step and the copy of its samples, which are there when the stream has come so far."""
        batch, chunk, groups = codes.shape
        bucket = next(size for size in self.settings.buckets if size >= batch)
        size = self._begin + bucket * chunk * groups
        pinned = self.stream is not None
        host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        numbers = host.numpy()
        numbers[:batch] = slots
        numbers[self._begin // 2 :][:batch] = positions
        numbers[self._begin :][: codes.size] = codes.reshape(-1)
        self._inputs[:size].copy_(host, non_blocking=True)
        graph = self.graphs.get((bucket, chunk))
        if graph is None:
            self._run(bucket, chunk)
        else:
            graph.replay()
        if silent:
            return host
        samples = chunk * self.network.samples_per_frame
        heard = torch.empty(batch, samples, dtype=torch.float32, pin_memory=pinned)
        return heard.copy_(self._out[: batch * samples].view(batch, samples), non_blocking=True)

    def _run(self, bucket: int, chunk: int) -> None:
        """A step of what ``_inputs`` says into ``_out``."""
        groups = self.network.groups
        where = Where(self._inputs[:bucket], self._inputs[self._begin // 2 :][:bucket])
        codes = self._inputs[self._begin :][: bucket * chunk * groups].view(bucket, chunk, groups)
        samples = chunk * self.network.samples_per_frame
        self.network(codes, where, self._out[: bucket * samples].view(bucket, samples))

    @torch.inference_mode()
    def _record(self) -> None:
        """All of ``settings``, the largest first: the others' memory fits into its."""
        begin = time.perf_counter()
        sizes = [(bucket, chunk) for bucket in self.settings.buckets for chunk in self.settings.chunks]
        sizes.sort(key=lambda size: -size[0] * size[1])
        different = {bucket * chunk: (bucket, chunk) for bucket, chunk in sizes}.values()  # kernels are as rows are
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            with fused_ops.compiling():
                for size in different:
                    self._run(*size)
            compiled = time.perf_counter()
            for size in different:  # what is set up at a first launch is not to be in a recording
                self._run(*size)
            self.stream.synchronize()
            torch.cuda.empty_cache()
            pool = torch.cuda.graph_pool_handle()
            for size in sizes:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._run(*size)
                finally:
                    graph.capture_end()
                self.graphs[size] = graph
        end = time.perf_counter()
        seconds = compiled - begin, end - compiled
        logger.info("compiled kernels in %.1f s; recorded %d graphs in %.1f s", seconds[0], len(sizes), seconds[1])


def _joined(arrays: list[npt.NDArray[np.float32]], axis: int) -> npt.NDArray[np.float32]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
