"""The decoder of the 12 Hz speech tokenizer as a network that runs in chunks of frames.

Codes of 16 groups become a vector per frame (split residual vector quantisation), go through a convolution and a
transformer with a sliding window at 12.5 Hz, are upsampled by four with ConvNeXt blocks, and by 480 with snake blocks
to 24 kHz. Everything is causal in frames. Stages and weights are those of ``Qwen3TTSTokenizerV2Decoder`` in
``qwen-tts`` 0.1.1 (``core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py``). Any chunks, joined, give what its
``forward`` gives for all frames at once, up to rounding. Its ``chunked_decode`` is another thing: from frame 300 on it
forgets what lies further back than 25 frames before a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from omni_core.errors import CheckpointError
from omni_plugin_qwen3_tts.config import Qwen3TTSTokenizerDecoderConfig
from omni_plugin_qwen3_tts.layout import DILATIONS
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

USAGE_FLOOR = 1e-5
"""What a codebook entry's ``cluster_usage`` is at least when its sum is divided by it."""


class Dequantizer(nn.Module):
    """Codes to vectors: the entry of group 0 and the sum of the other groups' entries, each projected, added."""

    def __init__(self, groups: int, size: int, width: int, outputs: int) -> None:
        super().__init__()
        self.size = size
        self.entries = nn.Parameter(torch.empty(groups * size, width))
        self.projection = nn.Parameter(torch.empty(outputs, 2 * width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, frames, groups] to [batch, outputs, frames]."""
        offsets = torch.arange(codes.shape[2], device=codes.device) * self.size
        entries = F.embedding(codes + offsets, self.entries)
        both = torch.cat((entries[:, :, 0], entries[:, :, 1:].sum(2)), dim=-1)
        return F.linear(both, self.projection).transpose(1, 2)


class PreTransformer(nn.Module):
    """The transformer at frame rate: [batch, latent, frames] to the same."""

    def __init__(self, config: Qwen3TTSTokenizerDecoderConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.window, self.head_dim = config.sliding_window, config.head_dim
        self.theta = float(config.rope_parameters["rope_theta"])
        self.input_proj = nn.Linear(config.latent_dim, hidden)
        self.layers = nn.ModuleList(
            SlidingLayer(
                SlidingAttention(
                    hidden,
                    config.num_attention_heads,
                    config.num_key_value_heads,
                    config.head_dim,
                    config.sliding_window,
                    bias=config.attention_bias,
                ),
                hidden,
                config.intermediate_size,
                eps,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps)
        self.output_proj = nn.Linear(hidden, config.latent_dim)

    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        x = self.input_proj(x.transpose(1, 2))
        context = AttentionContext(past, x.shape[1], self.window, self.head_dim, self.theta, x.dtype)
        for layer in self.layers:
            x = layer(x, context, past)
        return self.output_proj(self.norm(x)).transpose(1, 2)


class CodecNetwork(nn.Module):
    """The decoder's stages, in order, and how long a session's state is.

    Attributes:
        layout: where each layer's past lies in a state.
        groups, codebook_size: of the codes.
        samples_per_frame: that come out.
    """

    def __init__(self, config: Qwen3TTSTokenizerDecoderConfig) -> None:
        super().__init__()
        latent, rates = config.latent_dim, config.upsample_rates
        self.groups, self.codebook_size = config.num_quantizers, config.codebook_size
        self.samples_per_frame = config.samples_per_frame
        self.dequantizer = Dequantizer(
            config.num_quantizers, config.codebook_size, config.codebook_dim // 2, config.codebook_dim
        )
        self.pre_conv = CausalConv(config.codebook_dim, latent, 3)
        self.pre_transformer = PreTransformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalTransposedConv(latent, latent, factor, factor), ConvNeXt(latent)])
            for factor in config.upsampling_ratios
        )
        widths = [config.decoder_dim >> index for index in range(len(rates) + 1)]
        blocks = [
            SnakeUpsampling(inputs, outputs, rate, DILATIONS)
            for inputs, outputs, rate in zip(widths, widths[1:], rates, strict=False)
        ]
        self.decoder = nn.ModuleList(
            [CausalConv(latent, widths[0], 7), *blocks, Snake(widths[-1]), CausalConv(widths[-1], 1, 7)]
        )
        self.layout = PastLayout(self)

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
        return self.pre_transformer(self.pre_conv(self.dequantizer(codes), past), past)

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
        frames, rate = 0.0, 1
        for layer in self.modules():
            if isinstance(layer, CausalConv) and layer is not self.pre_conv:
                frames += layer.past_shape[1] / rate
            elif isinstance(layer, CausalTransposedConv):
                frames += layer.past_shape[1] / rate
                rate *= layer.stride
        return math.ceil(frames)


def build_network(
    config: Qwen3TTSTokenizerDecoderConfig, stored: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> CodecNetwork:
    """The network with the weights of a checkpoint.

    Args:
        stored: float32, by the names that the checkpoint has after ``decoder.``.

    Raises:
        CheckpointError: the configuration asks for what this network does not have.
    """
    for name, supported in (("hidden_act", "silu"), ("rope_type", "default")):
        said = config.rope_parameters.get(name) if name == "rope_type" else getattr(config, name)
        if said != supported:
            raise CheckpointError(f"the speech tokenizer's decoder has {name} {said!r}; only {supported!r} is known")
    with torch.device("meta"):
        network = CodecNetwork(config)
    weights = {name: tensor.to(device, dtype) for name, tensor in _weights(stored, config)}
    network.load_state_dict(weights, strict=True, assign=True)
    return network.requires_grad_(False).eval()


def _weights(
    stored: Mapping[str, torch.Tensor], config: Qwen3TTSTokenizerDecoderConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """The network's parameters: matrices that are multiplied with the same input as one, and what is constant, done.

    The quantizers' ``input_proj`` are for encoding, and not used.
    """
    yield from _dequantizer(stored, config.num_quantizers)
    for name, tensor in stored.items():
        owner, _, last = name.rpartition(".")
        if name.startswith("quantizer.") or last == "beta" or ".k_proj." in name or ".v_proj." in name:
            continue
        if last == "alpha":
            frequency, strength = Snake.from_logarithms(tensor, stored[f"{owner}.beta"])
            yield f"{owner}.frequency", frequency
            yield f"{owner}.strength", strength
        elif ".q_proj." in name:
            parts = [stored[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            yield name.replace(".q_proj.", ".qkv_proj."), torch.cat(parts)
        elif ".gate_proj." in name:
            up = stored[name.replace(".gate_proj.", ".up_proj.")]
            yield name.replace(".gate_proj.", ".gate_up_proj."), torch.cat((tensor, up))
        elif ".up_proj." not in name:
            yield name, tensor


def _dequantizer(stored: Mapping[str, torch.Tensor], groups: int) -> Iterator[tuple[str, torch.Tensor]]:
    layers = ["rvq_first.vq.layers.0", *(f"rvq_rest.vq.layers.{index}" for index in range(groups - 1))]
    entries = []
    for layer in layers:
        book = f"quantizer.{layer}._codebook"
        usage = stored[f"{book}.cluster_usage"].clamp(min=USAGE_FLOOR)
        entries.append(stored[f"{book}.embedding_sum"] / usage[:, None])
    yield "dequantizer.entries", torch.cat(entries)
    projections = [stored[f"quantizer.{part}.output_proj.weight"][..., 0] for part in ("rvq_first", "rvq_rest")]
    yield "dequantizer.projection", torch.cat(projections, dim=1)
