"""Codes of the 12 Hz speech tokenizer to vectors: split residual vector quantisation.

As ``SplitResidualVectorQuantizer`` of ``qwen-tts`` 0.1.1 does
(``core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from omni_speech_codec.codec_network import Dequantizer

USAGE_FLOOR = 1e-5
"""What a codebook entry's ``cluster_usage`` is at least when its sum is divided by it."""


class SplitDequantizer(Dequantizer):
    """The entry of group 0 and the sum of the other groups' entries, each projected, added."""

    def __init__(self, groups: int, size: int, width: int, outputs: int) -> None:
        super().__init__()
        self.groups, self.size = groups, size
        self.entries = nn.Parameter(torch.empty(groups * size, width))
        self.projection = nn.Parameter(torch.empty(outputs, 2 * width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, frames, groups] to [batch, outputs, frames]."""
        offsets = torch.arange(self.groups, device=codes.device) * self.size
        entries = F.embedding(codes + offsets, self.entries)
        both = torch.cat((entries[:, :, 0], entries[:, :, 1:].sum(2)), dim=-1)
        return F.linear(both, self.projection).transpose(1, 2)

    def fused(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """See ``Dequantizer``."""
        from omni_speech_codec import fused_ops as ops  # with Triton, which not every machine has
        from omni_speech_codec.codec_products import linear

        table, projection = self.entries.to(dtype), linear(self.projection, dtype)
        return lambda codes: ops.multiply(projection, ops.entries(codes, table, self.size, leading=1))[0]


def dequantizer_weights(stored: Mapping[str, torch.Tensor], groups: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Its parameters, from the names that the checkpoint has after ``decoder.``.

    The quantizers' ``input_proj`` are for encoding, and not used.
    """
    layers = ["rvq_first.vq.layers.0", *(f"rvq_rest.vq.layers.{index}" for index in range(groups - 1))]
    entries = []
    for layer in layers:
        book = f"quantizer.{layer}._codebook"
        usage = stored[f"{book}.cluster_usage"].clamp(min=USAGE_FLOOR)
        entries.append(stored[f"{book}.embedding_sum"] / usage[:, None])
    yield "dequantizer.entries", torch.cat(entries)
    projections = [stored[f"quantizer.{part}.output_proj.weight"][..., 0] for part in ("rvq_first", "rvq_rest")]
    yield "dequantizer.projection", torch.cat(projections, dim=1)
