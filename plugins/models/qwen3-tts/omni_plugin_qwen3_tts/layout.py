"""Names and shapes of the tensors in a Qwen3-TTS checkpoint, from its configurations."""

from __future__ import annotations

import torch
from transformers import MimiConfig, MimiModel

from omni_plugin_qwen3_tts.config import (
    Qwen3TTSConfig,
    Qwen3TTSSpeakerEncoderConfig,
    Qwen3TTSTalkerCodePredictorConfig,
    Qwen3TTSTalkerConfig,
    Qwen3TTSTokenizer12HzConfig,
    Qwen3TTSTokenizerDecoderConfig,
)
from omni_speech_codec.codec_network import DILATIONS
from omni_speech_codec.weights import Named


def model_tensors(config: Qwen3TTSConfig) -> Named:
    """``model.safetensors`` of the root folder."""
    talker = config.talker_config
    yield from _under("talker", _talker(talker))
    yield from _under("talker.code_predictor", _code_predictor(talker.code_predictor_config, talker.hidden_size))
    if config.tts_model_type == "base":
        yield from _under("speaker_encoder", _speaker_encoder(config.speaker_encoder_config))


def speech_tokenizer_tensors(config: Qwen3TTSTokenizer12HzConfig) -> Named:
    """``model.safetensors`` of the folder ``speech_tokenizer``."""
    yield from _under("encoder", _encoder(config.encoder_config))
    yield from _under("decoder", _decoder(config.decoder_config))


def _under(prefix: str, named: Named) -> Named:
    for name, shape in named:
        yield f"{prefix}.{name}", shape


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _conv(name: str, inputs: int, outputs: int, kernel: int, *, bias: bool = True) -> Named:
    """A convolution over time."""
    yield f"{name}.weight", (outputs, inputs, kernel)
    if bias:
        yield f"{name}.bias", (outputs,)


def _transposed_conv(name: str, inputs: int, outputs: int, kernel: int) -> Named:
    yield f"{name}.weight", (inputs, outputs, kernel)
    yield f"{name}.bias", (outputs,)


def _attention(
    config: Qwen3TTSTalkerConfig | Qwen3TTSTalkerCodePredictorConfig | Qwen3TTSTokenizerDecoderConfig,
) -> Named:
    hidden, bias = config.hidden_size, config.attention_bias
    query = config.num_attention_heads * config.head_dim
    for name in ("k_proj", "v_proj"):
        yield from _linear(name, hidden, config.num_key_value_heads * config.head_dim, bias=bias)
    yield from _linear("q_proj", hidden, query, bias=bias)
    yield from _linear("o_proj", query, hidden, bias=bias)


def _mlp(hidden: int, intermediate: int) -> Named:
    yield from _linear("gate_proj", hidden, intermediate, bias=False)
    yield from _linear("up_proj", hidden, intermediate, bias=False)
    yield from _linear("down_proj", intermediate, hidden, bias=False)


def _decoder_layers(config: Qwen3TTSTalkerConfig | Qwen3TTSTalkerCodePredictorConfig) -> Named:
    """Of talker and code predictor: Qwen3's, with norms of queries and keys over the head."""
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        yield from _under(f"{layer}.self_attn", _attention(config))
        yield f"{layer}.self_attn.q_norm.weight", (config.head_dim,)
        yield f"{layer}.self_attn.k_norm.weight", (config.head_dim,)
        yield from _under(f"{layer}.mlp", _mlp(config.hidden_size, config.intermediate_size))
        yield f"{layer}.input_layernorm.weight", (config.hidden_size,)
        yield f"{layer}.post_attention_layernorm.weight", (config.hidden_size,)
    yield "norm.weight", (config.hidden_size,)


def _talker(config: Qwen3TTSTalkerConfig) -> Named:
    text, hidden = config.text_hidden_size, config.hidden_size
    yield "model.codec_embedding.weight", (config.vocab_size, hidden)
    yield "model.text_embedding.weight", (config.text_vocab_size, text)
    yield from _under("model", _decoder_layers(config))
    yield from _linear("text_projection.linear_fc1", text, text)
    yield from _linear("text_projection.linear_fc2", text, hidden)
    yield from _linear("codec_head", hidden, config.vocab_size, bias=False)


def _code_predictor(config: Qwen3TTSTalkerCodePredictorConfig, talker_hidden: int) -> Named:
    for group in range(config.num_code_groups - 1):
        yield f"model.codec_embedding.{group}.weight", (config.vocab_size, talker_hidden)
        yield f"lm_head.{group}.weight", (config.vocab_size, config.hidden_size)
    yield from _under("model", _decoder_layers(config))
    if config.hidden_size != talker_hidden:
        yield from _linear("small_to_mtp_projection", talker_hidden, config.hidden_size)


def _speaker_encoder(config: Qwen3TTSSpeakerEncoderConfig) -> Named:
    channels, kernels = config.enc_channels, config.enc_kernel_sizes
    scale, squeezed, last = config.enc_res2net_scale, config.enc_se_channels, channels[-1]
    yield from _conv("blocks.0.conv", config.mel_dim, channels[0], kernels[0])
    for index in range(1, len(channels) - 1):
        block, width = f"blocks.{index}", channels[index]
        yield from _conv(f"{block}.tdnn1.conv", channels[index - 1], width, 1)
        for part in range(scale - 1):
            name = f"{block}.res2net_block.blocks.{part}.conv"
            yield from _conv(name, width // scale, width // scale, kernels[index])
        yield from _conv(f"{block}.tdnn2.conv", width, width, 1)
        yield from _conv(f"{block}.se_block.conv1", width, squeezed, 1)
        yield from _conv(f"{block}.se_block.conv2", squeezed, width, 1)
    yield from _conv("mfa.conv", last, last, kernels[-1])
    yield from _conv("asp.tdnn.conv", 3 * last, config.enc_attention_channels, 1)
    yield from _conv("asp.conv", config.enc_attention_channels, last, 1)
    yield from _conv("fc", 2 * last, config.enc_dim, 1)


def _encoder(config: MimiConfig) -> Named:
    """Mimi without the parts that decode."""
    with torch.device("meta"):
        state = MimiModel(config).state_dict()
    for name, tensor in state.items():
        if name.partition(".")[0] not in ("upsample", "decoder", "decoder_transformer"):
            yield name, tuple(tensor.shape)


def _decoder(config: Qwen3TTSTokenizerDecoderConfig) -> Named:
    latent, rates = config.latent_dim, config.upsample_rates
    yield from _quantizer(config)
    yield from _conv("pre_conv.conv", config.codebook_dim, latent, 3)
    yield from _under("pre_transformer", _pre_transformer(config))
    for index, factor in enumerate(config.upsampling_ratios):
        stage = f"upsample.{index}"
        yield from _transposed_conv(f"{stage}.0.conv", latent, latent, factor)
        yield from _conv(f"{stage}.1.dwconv.conv", 1, latent, 7)  # one group per channel
        yield f"{stage}.1.norm.weight", (latent,)
        yield f"{stage}.1.norm.bias", (latent,)
        yield from _linear(f"{stage}.1.pwconv1", latent, 4 * latent)
        yield from _linear(f"{stage}.1.pwconv2", 4 * latent, latent)
        yield f"{stage}.1.gamma", (latent,)
    yield from _conv("decoder.0.conv", latent, config.decoder_dim, 7)
    for index, rate in enumerate(rates):
        yield from _under(f"decoder.{index + 1}.block", _decoder_block(config.decoder_dim >> index, rate))
    last = config.decoder_dim >> len(rates)
    yield from _snake(f"decoder.{len(rates) + 1}", last)
    yield from _conv(f"decoder.{len(rates) + 2}.conv", last, 1, 7)


def _quantizer(config: Qwen3TTSTokenizerDecoderConfig) -> Named:
    """Group 0, and the others. A codebook is ``embedding_sum / cluster_usage``; it has half of ``codebook_dim``."""
    width = config.codebook_dim // 2
    for part, count in (("rvq_first", 1), ("rvq_rest", config.num_quantizers - 1)):
        quantizer = f"quantizer.{part}"
        yield from _conv(f"{quantizer}.input_proj", config.codebook_dim, width, 1, bias=False)
        yield from _conv(f"{quantizer}.output_proj", width, config.codebook_dim, 1, bias=False)
        for layer in range(count):
            codebook = f"{quantizer}.vq.layers.{layer}._codebook"
            yield f"{codebook}.cluster_usage", (config.codebook_size,)
            yield f"{codebook}.embedding_sum", (config.codebook_size, width)


def _pre_transformer(config: Qwen3TTSTokenizerDecoderConfig) -> Named:
    hidden = config.hidden_size
    yield from _linear("input_proj", config.latent_dim, hidden)
    yield from _linear("output_proj", hidden, config.latent_dim)
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        yield from _under(f"{layer}.self_attn", _attention(config))
        yield from _under(f"{layer}.mlp", _mlp(hidden, config.intermediate_size))
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield f"{layer}.{name}", (hidden,)
        for name in ("self_attn_layer_scale.scale", "mlp_layer_scale.scale"):
            yield f"{layer}.{name}", (hidden,)
    yield "norm.weight", (hidden,)


def _decoder_block(inputs: int, rate: int) -> Named:
    outputs = inputs // 2
    yield from _snake("0", inputs)
    yield from _transposed_conv("1.conv", inputs, outputs, 2 * rate)
    for index in range(len(DILATIONS)):
        unit = f"{index + 2}"
        yield from _snake(f"{unit}.act1", outputs)
        yield from _conv(f"{unit}.conv1.conv", outputs, outputs, 7)
        yield from _snake(f"{unit}.act2", outputs)
        yield from _conv(f"{unit}.conv2.conv", outputs, outputs, 1)


def _snake(name: str, channels: int) -> Named:
    yield f"{name}.alpha", (channels,)
    yield f"{name}.beta", (channels,)
