"""The decoder of a speech codec as a network that runs in chunks of frames.

Codes become a vector per frame, go through a transformer with a sliding window at 12.5 Hz, are upsampled by four with
ConvNeXt blocks, and by 480 with snake blocks to 24 kHz. Everything is causal in frames. Families differ in how codes
become vectors (``Dequantizer``) and in what ``CodecShape`` says. Any chunks, joined, give what the references' own
``forward`` gives for all frames at once, up to rounding. Their ``chunked_decode`` is another thing: from frame 300 on
it forgets what lies further back than 25 frames before a chunk.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from omni_speech_codec.streaming_layers import (
    AttentionContext,
    CausalConv,
    CausalTransposedConv,
    ConvNeXt,
    Past,
    PastLayout,
    RMSNorm,
    SlidingAttention,
    SlidingLayer,
    Snake,
    SnakeUpsampling,
)

DILATIONS = (1, 3, 9)
"""Of the residual units in a block."""


@dataclass(frozen=True)
class CodecShape:
    """Sizes of the network behind the dequantiser.

    Attributes:
        latent: channels at frame rate.
        dequantized: channels of a frame's vector, which a convolution over 3 frames takes to ``latent``; then the
            transformer has projections around it. ``None`` where the vector has ``latent`` channels and goes straight
            into the transformer.
        hidden, intermediate, layers, heads, kv_heads, head_dim: of the transformer; ``hidden`` is ``latent`` where
            there are no projections.
        window: frames that a query sees, its own included.
        bias: of attention's projections.
        eps, theta: of its norms and rotary embedding.
        factors: of upsampling with ConvNeXt blocks.
        width: channels that the first of the snake blocks takes; each gives half.
        rates: of the snake blocks.
        begins_late: the reference cuts as much from the begin of what a transposed convolution gives as from the end,
            so that a session's first frame has less samples than the others.
    """

    latent: int
    dequantized: int | None
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    bias: bool
    eps: float
    theta: float
    factors: tuple[int, ...]
    width: int
    rates: tuple[int, ...]
    begins_late: bool

    @property
    def samples_per_frame(self) -> int:
        """That come out."""
        return math.prod((*self.factors, *self.rates))


class Dequantizer(nn.Module, ABC):
    """Codes to a vector per frame.

    Attributes:
        groups: of codes in a frame.
        size: of a group's codebook.
    """

    groups: int
    size: int

    @abstractmethod
    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, frames, groups] to [batch, channels, frames]."""

    @abstractmethod
    def fused(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """The same on CUDA with weights in ``dtype``: int32 [batch, frames, groups] to [batch * frames, channels]."""


class PreTransformer(nn.Module):
    """The transformer at frame rate: [batch, latent, frames] to the same."""

    def __init__(self, shape: CodecShape) -> None:
        super().__init__()
        hidden, projected = shape.hidden, shape.dequantized is not None
        self.window, self.head_dim, self.theta = shape.window, shape.head_dim, shape.theta
        self.input_proj = nn.Linear(shape.latent, hidden) if projected else None
        self.layers = nn.ModuleList(
            SlidingLayer(
                SlidingAttention(hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.window, bias=shape.bias),
                hidden,
                shape.intermediate,
                shape.eps,
            )
            for _ in range(shape.layers)
        )
        self.norm = RMSNorm(hidden, shape.eps)
        self.output_proj = nn.Linear(hidden, shape.latent) if projected else None

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        x = x.transpose(1, 2)
        if self.input_proj is not None:
            x = self.input_proj(x)
        context = AttentionContext(past, x.shape[1], self.window, self.head_dim, self.theta, x.dtype)
        for layer in self.layers:
            x = layer(x, context, past)
        x = self.norm(x)
        if self.output_proj is not None:
            x = self.output_proj(x)
        return x.transpose(1, 2)


class CodecNetwork(nn.Module):
    """The decoder's stages, in order, and how long a session's state is.

    Attributes:
        layout: where each layer's past lies in a state.
        groups, codebook_size: of the codes.
        samples_per_frame: that come out.
        skipped: of them, at a session's begin, belong to no sound.
    """

    def __init__(self, dequantizer: Dequantizer, shape: CodecShape) -> None:
        super().__init__()
        latent, rates = shape.latent, shape.rates
        self.groups, self.codebook_size = dequantizer.groups, dequantizer.size
        self.samples_per_frame = shape.samples_per_frame
        self.dequantizer = dequantizer
        self.pre_conv = None if shape.dequantized is None else CausalConv(shape.dequantized, latent, 3)
        self.pre_transformer = PreTransformer(shape)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalTransposedConv(latent, latent, factor, factor), ConvNeXt(latent)])
            for factor in shape.factors
        )
        widths = [shape.width >> index for index in range(len(rates) + 1)]
        blocks = [
            SnakeUpsampling(inputs, outputs, rate, DILATIONS)
            for inputs, outputs, rate in zip(widths, widths[1:], rates, strict=False)
        ]
        self.decoder = nn.ModuleList(
            [CausalConv(latent, widths[0], 7), *blocks, Snake(widths[-1]), CausalConv(widths[-1], 1, 7)]
        )
        self.skipped = self._place(begins_late=shape.begins_late)
        self.layout = PastLayout(self)

    def _place(self, *, begins_late: bool) -> int:
        """Tell layers their rate, and how much before them is skipped; gives the latter of the samples."""
        rate, skipped = 1, 0
        for layer in self._rendering():
            layer.rate, layer.skipped = rate, skipped
            if isinstance(layer, CausalTransposedConv):
                rate *= layer.stride
                skipped = skipped * layer.stride + (layer.conv.kernel_size[0] - layer.stride) * begins_late
        return skipped

    def _rendering(self) -> list[CausalConv | CausalTransposedConv]:
        """The convolutions behind the transformer, in order."""
        modules = [*self.upsample.modules(), *self.decoder.modules()]
        return [layer for layer in modules if isinstance(layer, CausalConv | CausalTransposedConv)]

    def forward(self, codes: torch.Tensor, packed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take every row one chunk further.

        Args:
            codes: int64 [batch, frames, groups], each below ``codebook_size``.
            packed: [batch, layout.size], the states; overwritten with those after the chunk.
            positions: int64 [batch], frames that each row has behind it.

        Returns:
            [batch, frames * samples_per_frame] in [-1, 1].
        """
        past = Past(self.layout, packed, positions)
        return self.render(self.latents(codes, past), past)

    def latents(self, codes: torch.Tensor, past: Past) -> torch.Tensor:
        """The stages at frame rate: [batch, latent, frames]."""
        x = self.dequantizer(codes)
        if self.pre_conv is not None:
            x = self.pre_conv(x, past)
        return self.pre_transformer(x, past)

    def render(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        """The stages that upsample: [batch, frames * samples_per_frame]."""
        for transposed, block in self.upsample:
            x = block(transposed(x, past), past)
        first, *blocks, snake, last = self.decoder
        x = first(x, past)
        for block in blocks:
            x = block(x, past)
        return last(snake(x), past)[:, 0].clamp(-1, 1)

    @property
    def reach(self) -> int:
        """Frames before a chunk, at most, that ``render`` looks back at; ``latents`` looks further."""
        return math.ceil(sum(layer.past_shape[1] / layer.rate for layer in self._rendering()))
