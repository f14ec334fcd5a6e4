"""The speech tokenizer's decoder as a module stage.

Stages and weights are those of ``Qwen3TTSTokenizerV2Decoder`` in ``qwen-tts`` 0.1.1
(``core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from omni_core.module.contract import ModuleContext
from omni_plugin_qwen3_tts.config import Qwen3TTSTokenizer12HzConfig, Qwen3TTSTokenizerDecoderConfig
from omni_plugin_qwen3_tts.dequantizer import SplitDequantizer, dequantizer_weights
from omni_plugin_qwen3_tts.layout import speech_tokenizer_tensors
from omni_speech_codec.codec_network import CodecNetwork, CodecShape
from omni_speech_codec.codec_weights import check_known, fill, network_weights
from omni_speech_codec.streaming_decoder import StreamingDecoder
from omni_speech_codec.weights import read_config, read_part


class CodecDecoder(StreamingDecoder):
    """See ``StreamingDecoder``: 1920 samples for each frame, at 24 kHz."""

    @classmethod
    def read(cls, context: ModuleContext, dtype: torch.dtype) -> CodecNetwork:
        """The decoder in the folder ``speech_tokenizer``."""
        folder = context.checkpoint / "speech_tokenizer"
        config = read_config(Qwen3TTSTokenizer12HzConfig, folder)
        stored = read_part(folder, "decoder", speech_tokenizer_tensors(config))
        return build_network(config.decoder_config, stored, context.device, dtype)


def build_network(
    config: Qwen3TTSTokenizerDecoderConfig, stored: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> CodecNetwork:
    """The network with the weights of a checkpoint.

    Args:
        stored: float32, by the names that the checkpoint has after ``decoder.``.

    Raises:
        CheckpointError: the configuration asks for what this network does not have.
    """
    check_known("the speech tokenizer's decoder", config.hidden_act, config.rope_parameters.get("rope_type"))
    with torch.device("meta"):
        network = empty_network(config)
    behind = {name: tensor for name, tensor in stored.items() if not name.startswith("quantizer.")}
    weights = itertools.chain(dequantizer_weights(stored, config.num_quantizers), network_weights(behind))
    return fill(network, weights, device, dtype)


def empty_network(config: Qwen3TTSTokenizerDecoderConfig) -> CodecNetwork:
    """The network without weights."""
    dequantizer = SplitDequantizer(
        config.num_quantizers, config.codebook_size, config.codebook_dim // 2, config.codebook_dim
    )
    shape = CodecShape(
        latent=config.latent_dim,
        dequantized=config.codebook_dim,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        window=config.sliding_window,
        bias=config.attention_bias,
        eps=config.rms_norm_eps,
        theta=float(config.rope_parameters["rope_theta"]),
        factors=tuple(config.upsampling_ratios),
        width=config.decoder_dim,
        rates=tuple(config.upsample_rates),
        begins_late=False,
    )
    return CodecNetwork(dequantizer, shape)
