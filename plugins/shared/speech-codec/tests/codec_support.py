"""Small networks with random weights, in the shapes that families have."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from omni_speech_codec.codec_network import CodecNetwork, CodecShape, Dequantizer

GROUPS, SIZE = 4, 8
PROJECTED = CodecShape(
    latent=32, dequantized=24, hidden=16, intermediate=32, layers=1, heads=2, kv_heads=1, head_dim=16, window=3,
    bias=False, eps=1e-5, theta=1e4, factors=(2,), width=64, rates=(2, 3), begins_late=False,
)  # fmt: skip
"""Like Qwen3-TTS's: 12 samples for a frame, residual units of 32 and 16 channels."""
STRAIGHT = CodecShape(
    latent=32, dequantized=None, hidden=32, intermediate=32, layers=1, heads=2, kv_heads=2, head_dim=16, window=3,
    bias=True, eps=1e-5, theta=1e4, factors=(2,), width=64, rates=(2, 3), begins_late=True,
)  # fmt: skip
"""Like Qwen3-Omni's."""
SHAPES = {"projected": PROJECTED, "straight": STRAIGHT}


class Sum(Dequantizer):
    """The groups' entries added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.groups, self.size = GROUPS, SIZE
        self.entries = nn.Parameter(torch.empty(GROUPS * SIZE, width))

    def forward(self, codes):
        offsets = torch.arange(GROUPS, device=codes.device) * SIZE
        return F.embedding(codes + offsets, self.entries).sum(2).transpose(1, 2)

    def fused(self, dtype):
        from omni_speech_codec import fused_ops as ops

        table = self.entries.to(dtype)
        return lambda codes: ops.entries(codes, table, SIZE, leading=GROUPS)


def random_network(shape: CodecShape, device="cpu", dtype=torch.float32, seed=0) -> CodecNetwork:
    """Every weight changes the sound, which is not clipped."""
    network = CodecNetwork(Sum(shape.dequantized or shape.latent), shape).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if noise.ndim > 1:
            noise *= (0.05 if len(noise) == 1 else 0.5) / math.sqrt(math.prod(noise.shape[1:]))
        else:
            noise = 0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise
        parameter.copy_(noise)
    return network.to(device, dtype)
