"""The code predictor, run as it is or as a device graph for each batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_core.ar.contract import TalkerModel
from omni_core.ar.sampling import sample_codes


@dataclass
class CodeInputs:
    """What the predictor reads, one row for each request of the batch.

    Attributes:
        hidden: [n, hidden], the backbone's last hidden state.
        first: int64 [n], the first code of the frame.
        frame: int64 [n], the frame's number.
        seed: int64 [n].
        temperature: float32 [n].
        top_k: int64 [n].
        top_p: float32 [n].
    """

    hidden: torch.Tensor
    first: torch.Tensor
    frame: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in order."""
        return (self.hidden, self.first, self.frame, self.seed, self.temperature, self.top_k, self.top_p)

    def head(self, count: int) -> CodeInputs:
        """The first ``count`` rows, as views."""
        return CodeInputs(*(tensor[:count] for tensor in self.tensors()))


class CodePredictor:
    """Predicts the codes of a frame for a batch; ``capture`` makes graphs, without which it runs as it is."""

    def __init__(self, model: TalkerModel) -> None:
        self.model = model
        self._static: CodeInputs | None = None
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}

    def predict(self, inputs: CodeInputs) -> torch.Tensor:
        """int64 [n, code groups]; overwritten by the next call where it comes from a graph."""
        count = len(inputs.first)
        size = next((size for size in self._graphs if size >= count), None)
        if size is None or self._static is None:
            return self._predict(inputs)
        for static, value in zip(self._static.head(count).tensors(), inputs.tensors(), strict=True):
            static.copy_(value)
        graph, codes = self._graphs[size]
        graph.replay()
        return codes[:count]

    def _predict(self, inputs: CodeInputs) -> torch.Tensor:
        groups = self.model.num_code_groups

        def choose(logits: torch.Tensor, group: int) -> torch.Tensor:
            counters = inputs.frame * groups + group
            return sample_codes(logits, inputs.temperature, inputs.top_k, inputs.top_p, inputs.seed, counters)

        return self.model.predict_codes(inputs.hidden, inputs.first, choose)

    def capture(self, sizes: Sequence[int], hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Record a graph for each of ``sizes``; a batch uses the smallest that holds it."""
        largest, accelerator = max(sizes), torch.get_device_module(device)
        whole = {"dtype": torch.int64, "device": device}
        real = {"dtype": torch.float32, "device": device}
        self._static = CodeInputs(
            hidden=torch.zeros(largest, hidden_size, dtype=dtype, device=device),
            first=torch.zeros(largest, **whole),
            frame=torch.zeros(largest, **whole),
            seed=torch.zeros(largest, **whole),
            temperature=torch.ones(largest, **real),
            top_k=torch.zeros(largest, **whole),
            top_p=torch.ones(largest, **real),
        )
        for size in sorted(sizes):
            inputs = self._static.head(size)
            for _ in range(2):
                self._predict(inputs)
            accelerator.synchronize()
            graph = accelerator.CUDAGraph()
            with accelerator.graph(graph):
                codes = self._predict(inputs)
            self._graphs[size] = (graph, codes)
