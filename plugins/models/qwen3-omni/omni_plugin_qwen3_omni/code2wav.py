"""Code2Wav as a module stage: frames of codes at 12.5 Hz to sound at 24 kHz.

Stages and weights are those of ``Qwen3OmniMoeCode2Wav`` in transformers 5.19
(``models/qwen3_omni_moe/modeling_qwen3_omni_moe.py``). Chunks, joined, are what its ``forward`` gives for all frames at
once. It cuts as many samples from the begin of what a transposed convolution gives as from its end, so that ``n``
frames have ``1920 * n - 555`` samples: the first chunk of a session is that much shorter.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from omni_core.errors import CheckpointError
from omni_core.module.contract import ModuleContext
from omni_speech_codec.codec_network import CodecNetwork, CodecShape, Dequantizer
from omni_speech_codec.codec_weights import check_known, fill, network_weights, stored_tensors
from omni_speech_codec.streaming_decoder import StreamingDecoder
from omni_speech_codec.weights import Named, read_part

MODEL_TYPE = "qwen3_omni_moe"
PART = "code2wav"
"""What the names of its tensors begin with."""
TABLE = "code_embedding.weight"


class Code2Wav(StreamingDecoder):
    """See ``StreamingDecoder``: 1920 samples for each frame but a session's first, which has 1365."""

    @classmethod
    def read(cls, context: ModuleContext, dtype: torch.dtype) -> CodecNetwork:
        """The part ``code2wav`` of a checkpoint; no shard without a tensor of it is read."""
        config = read_code2wav_config(context.checkpoint)
        network = empty_network(config)
        prefixed = ((f"{PART}.{name}", shape) for name, shape in code2wav_tensors(network))
        return fill_network(network, read_part(context.checkpoint, PART, prefixed), context.device, dtype)


class MeanDequantizer(Dequantizer):
    """The mean of the groups' entries, of one table with the groups' codebooks one behind the other."""

    def __init__(self, groups: int, size: int, width: int) -> None:
        super().__init__()
        self.groups, self.size = groups, size
        self.entries = nn.Parameter(torch.empty(groups * size, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, frames, groups] to [batch, width, frames]."""
        offsets = torch.arange(self.groups, device=codes.device) * self.size
        return F.embedding(codes + offsets, self.entries).mean(2).transpose(1, 2)

    def fused(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """See ``Dequantizer``."""
        from omni_speech_codec import fused_ops as ops  # with Triton, which not every machine has

        table = self.entries.to(dtype)
        return lambda codes: ops.entries(codes, table, self.size, leading=self.groups, scale=1.0 / self.groups)


def read_code2wav_config(folder: Path) -> Qwen3OmniMoeCode2WavConfig:
    """Of ``config.json``.

    Raises:
        CheckpointError: it is missing, no JSON, of another model, or says nothing of Code2Wav.
    """
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values.get("model_type") != MODEL_TYPE:
            raise ValueError(f"model_type is {values.get('model_type')!r}, expected {MODEL_TYPE!r}")
        if not values.get("enable_audio_output", True):
            raise ValueError("enable_audio_output is false: the checkpoint does not speak")
        return Qwen3OmniMoeCode2WavConfig(**values["code2wav_config"])
    except Exception as error:  # transformers' own checks raise several unrelated classes
        raise CheckpointError(f"{file}: not a usable configuration of Code2Wav ({error!r})") from error


def empty_network(config: Qwen3OmniMoeCode2WavConfig) -> CodecNetwork:
    """The network on the meta device.

    Raises:
        CheckpointError: the configuration asks for what this network does not have.
    """
    check_known("Code2Wav", config.hidden_act, config.rope_parameters.get("rope_type"))
    shape = CodecShape(
        latent=config.hidden_size,
        dequantized=None,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        window=config.sliding_window,
        bias=config.attention_bias,
        eps=config.rms_norm_eps,
        theta=float(config.rope_parameters["rope_theta"]),
        factors=tuple(config.upsampling_ratios),
        width=config.decoder_dim,
        rates=tuple(config.upsample_rates),
        begins_late=True,
    )
    with torch.device("meta"):
        return CodecNetwork(MeanDequantizer(config.num_quantizers, config.codebook_size, config.hidden_size), shape)


def code2wav_tensors(network: CodecNetwork) -> Named:
    """Names behind ``code2wav.``, and shapes, of the checkpoint's tensors."""
    yield TABLE, tuple(network.dequantizer.entries.shape)
    yield from stored_tensors(network)


def fill_network(
    network: CodecNetwork, stored: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> CodecNetwork:
    """Put tensors of ``code2wav_tensors``, float32, into the network."""
    return fill(network, _weights(stored), device, dtype)


def _weights(stored: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    behind = {name: tensor for name, tensor in stored.items() if name != TABLE}
    return itertools.chain([("dequantizer.entries", stored[TABLE])], network_weights(behind))
