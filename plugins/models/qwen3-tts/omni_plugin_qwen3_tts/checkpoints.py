"""Random Qwen3-TTS checkpoints in the genuine layout: tiny ones, or ones of genuine size. No network.

    python -m omni_plugin_qwen3_tts.checkpoints FOLDER --kind custom-voice
    python -m omni_plugin_qwen3_tts.checkpoints FOLDER --kind base --size 1.7b --device cuda

They babble, but they go through every code path that a real checkpoint does. The reference (``qwen-tts``) can load
them: names and shapes of their tensors are those that it saves.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from omni_plugin_qwen3_tts.config import Qwen3TTSConfig, Qwen3TTSTokenizer12HzConfig
from omni_plugin_qwen3_tts.layout import model_tensors, speech_tokenizer_tensors
from omni_plugin_qwen3_tts.vocabulary import size, special_token, write_tokenizer
from omni_speech_codec.weights import Named

KINDS = {"custom-voice": "custom_voice", "voice-design": "voice_design", "base": "base"}
"""What the command calls them, and ``tts_model_type``."""

LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071, "spanish": 2054,
    "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069,
}  # fmt: skip
DIALECTS = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
SPEAKERS = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861, "ono_anna": 2873, "sohee": 2864,
    "eric": 2875, "dylan": 2878,
}  # fmt: skip
DIALECT_OF = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
CODEC_TOKENS = {
    "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154,
    "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
}  # fmt: skip
"""Tokens of the talker in released checkpoints, whose codebooks have 2048 entries; the ones above are no codes."""

TEXT_TOKENS = {
    "im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>", "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>", "tts_eos_token_id": "<tts_text_eod>",
}  # fmt: skip

GENERATION = {
    "do_sample": True, "top_k": 50, "top_p": 1.0, "temperature": 0.9, "repetition_penalty": 1.05,
    "subtalker_dosample": True, "subtalker_top_k": 50, "subtalker_top_p": 1.0, "subtalker_temperature": 0.9,
    "max_new_tokens": 8192,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How large a checkpoint is.

    Attributes:
        name: ``tts_model_size``.
        talker, predictor, speaker, encoder, decoder: what their configurations say about it.
        codebook: entries of a codebook. The talker's other tokens keep their distance to it.
        genuine: whether text has the numbers of Qwen's tokens.
    """

    name: str
    talker: Mapping[str, Any]
    predictor: Mapping[str, Any]
    speaker: Mapping[str, Any]
    encoder: Mapping[str, Any]
    decoder: Mapping[str, Any]
    codebook: int = 2048
    genuine: bool = True


def _layers(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


_ROPE = {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default", "type": "default"}
_TALKER = {"text_hidden_size": 2048, "rope_scaling": _ROPE}
_PREDICTOR = _layers(1024, 3072, 5, 16, 8, 128)
_ENCODER = {
    **_layers(512, 2048, 8, 8, 8, 64), "num_filters": 64, "codebook_dim": 256,
    "vector_quantization_hidden_dimension": 256, "upsample_groups": 512, "sliding_window": 250,
}  # fmt: skip
_DECODER = {
    **_layers(512, 1024, 8, 16, 16, 64), "codebook_dim": 512, "vector_quantization_hidden_dimension": 512,
    "latent_dim": 1024, "decoder_dim": 1536, "sliding_window": 72,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "talker": {
        **_layers(64, 128, 3, 4, 2, 32), "text_hidden_size": 48, "rope_scaling": {**_ROPE, "mrope_section": [6, 5, 5]},
    },
    "speaker": {
        "enc_dim": 64, "enc_channels": [32, 32, 32, 32, 96], "enc_attention_channels": 16, "enc_se_channels": 16,
    },
    "encoder": {
        **_layers(32, 64, 2, 2, 2, 16), "num_filters": 4, "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16, "upsample_groups": 32, "sliding_window": 250,
    },
    "decoder": {
        **_layers(32, 64, 3, 4, 4, 16), "codebook_dim": 32, "vector_quantization_hidden_dimension": 32,
        "latent_dim": 48, "decoder_dim": 64, "sliding_window": 8,
    },
    "codebook": 256,
    "genuine": False,
}  # fmt: skip

SIZES = {
    "0.6b": Size(
        "0b6", {**_layers(1024, 3072, 28, 16, 8, 128), **_TALKER}, _PREDICTOR, {"enc_dim": 1024}, _ENCODER, _DECODER
    ),
    "1.7b": Size(
        "1b7", {**_layers(2048, 6144, 28, 16, 8, 128), **_TALKER}, _PREDICTOR, {"enc_dim": 2048}, _ENCODER, _DECODER
    ),
    "tiny": Size("1b7", predictor=_layers(48, 96, 3, 4, 2, 32), **_TINY),
    "tiny-0.6b": Size("0b6", predictor=_layers(64, 96, 3, 4, 2, 32), **_TINY),
}
"""``tiny`` is like 1.7B, whose code predictor is narrower than its talker; ``tiny-0.6b`` is like 0.6B: as wide."""


def model_config(kind: str, size_name: str = "tiny") -> dict[str, Any]:
    """What ``config.json`` says of a checkpoint of ``KINDS`` and ``SIZES``."""
    wanted, custom = SIZES[size_name], kind == "custom-voice"
    offset = 2048 - wanted.codebook
    predictor = {
        **wanted.predictor, "model_type": "qwen3_tts_talker_code_predictor", "vocab_size": wanted.codebook,
        "num_code_groups": 16, "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-06, "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
        "sliding_window": None, "tie_word_embeddings": False,
    }  # fmt: skip
    talker = {
        **wanted.talker, "model_type": "qwen3_tts_talker", "code_predictor_config": predictor,
        "vocab_size": wanted.codebook + 1024, "text_vocab_size": size(genuine=wanted.genuine), "num_code_groups": 16,
        "rope_theta": 1000000, "max_position_embeddings": 32768, "position_id_per_seconds": 13, "rms_norm_eps": 1e-06,
        "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
        **{name: token - offset for name, token in CODEC_TOKENS.items()},
        "codec_language_id": {
            name: token - offset for name, token in {**LANGUAGES, **(DIALECTS if custom else {})}.items()
        },
        "spk_id": {name: token - offset for name, token in SPEAKERS.items()} if custom else {},
        "spk_is_dialect": {name: DIALECT_OF.get(name, False) for name in SPEAKERS} if custom else {},
    }  # fmt: skip
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": wanted.name,
        "tts_model_type": KINDS[kind],
        **{field: special_token(token, genuine=wanted.genuine) for field, token in TEXT_TOKENS.items()},
        **({"speaker_encoder_config": {**wanted.speaker, "sample_rate": 24000}} if kind == "base" else {}),
        "talker_config": talker,
    }


def speech_tokenizer_config(size_name: str = "tiny") -> dict[str, Any]:
    """What ``speech_tokenizer/config.json`` says."""
    wanted = SIZES[size_name]
    encoder = {
        **wanted.encoder, "model_type": "mimi", "_frame_rate": 12.5, "sampling_rate": 24000, "audio_channels": 1,
        "codebook_size": wanted.codebook, "num_quantizers": 32, "num_semantic_quantizers": 1,
        "upsampling_ratios": [8, 6, 5, 4], "kernel_size": 7, "last_kernel_size": 3, "residual_kernel_size": 3,
        "num_residual_layers": 1, "compress": 2, "dilation_growth_rate": 2, "pad_mode": "constant",
        "trim_right_ratio": 1.0, "use_causal_conv": True, "use_conv_shortcut": False, "use_streaming": False,
        "hidden_act": "gelu", "norm_eps": 1e-05, "rope_theta": 10000.0, "max_position_embeddings": 8000,
        "layer_scale_initial_scale": 0.01, "attention_bias": False, "attention_dropout": 0.0, "use_cache": False,
    }  # fmt: skip
    decoder = {
        **wanted.decoder, "codebook_size": wanted.codebook, "semantic_codebook_size": 2 * wanted.codebook,
        "num_quantizers": 16, "num_semantic_quantizers": 1, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2],
        "rms_norm_eps": 1e-05, "rope_theta": 10000, "max_position_embeddings": 8000, "hidden_act": "silu",
        "layer_scale_initial_scale": 0.01, "attention_bias": False, "attention_dropout": 0.0,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920,
        "encoder_config": encoder,
        "decoder_config": decoder,
    }


def write_checkpoint(
    folder: Path,
    *,
    kind: str = "custom-voice",
    size_name: str = "tiny",
    seed: int = 0,
    device: str = "cpu",
    endless: bool = False,
) -> Path:
    """Write a checkpoint: the model in bfloat16, its speech tokenizer in float32.

    Args:
        folder: where to.
        kind: one of ``KINDS``.
        size_name: one of ``SIZES``.
        seed: of the weights, which depend on the device too.
        device: where the weights are made.
        endless: the end of speech is never among the likeliest codes, so that requests run to their bound.

    Raises:
        ValueError: 0.6B has no voice design.
    """
    wanted = SIZES[size_name]
    if kind == "voice-design" and wanted.name == "0b6":
        raise ValueError("voice-design is of 1.7B alone: give --size 1.7b or tiny")
    generator = torch.Generator(device).manual_seed(seed)
    speech = folder / "speech_tokenizer"
    speech.mkdir(parents=True, exist_ok=True)
    config, speech_config = model_config(kind, size_name), speech_tokenizer_config(size_name)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", GENERATION)
    _write_json(
        folder / "preprocessor_config.json",
        {"padding_side": "left", "padding_value": 0.0, "processor_class": "Qwen3TTSProcessor"},
    )
    _write_json(speech / "config.json", speech_config)
    _write_json(
        speech / "preprocessor_config.json",
        {
            "chunk_length_s": None, "feature_extractor_type": "EncodecFeatureExtractor", "feature_size": 1,
            "overlap": None, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": True,
            "sampling_rate": 24000,
        },
    )  # fmt: skip
    write_tokenizer(folder, genuine=wanted.genuine)
    zeroed = {"talker.codec_head.weight": config["talker_config"]["codec_eos_token_id"]} if endless else {}
    _write_weights(folder, model_tensors(Qwen3TTSConfig(**config)), generator, torch.bfloat16, zeroed)
    _write_weights(
        speech, speech_tokenizer_tensors(Qwen3TTSTokenizer12HzConfig(**speech_config)), generator, torch.float32
    )
    return folder


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def random_tensors(named: Named, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights, float32 on the generator's device; what goes through them keeps its size."""
    for name, shape in named:
        yield name, _random(name, shape, generator)


def _write_weights(
    folder: Path,
    named: Named,
    generator: torch.Generator,
    dtype: torch.dtype,
    zeroed: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """``zeroed``: by tensor, a row that is made zero."""
    tensors = {name: tensor.to(dtype).cpu() for name, tensor in random_tensors(named, generator)}
    for name, row in zeroed.items():
        tensors[name][row] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor that keeps the size of what passes through it, and differs from what is neutral; float32."""
    tensor = torch.empty(shape, device=generator.device)
    last = name.rpartition(".")[2]
    if last == "initialized":  # a flag of Mimi's codebooks
        return tensor.fill_(1)
    if last == "cluster_usage":
        return tensor.uniform_(0.5, 2, generator=generator)
    tensor.normal_(generator=generator)
    if last in ("scale", "gamma"):  # what a residual is scaled by
        return 0.5 + 0.1 * tensor
    if last in ("bias", "alpha", "beta"):
        return (0.01 if name.startswith("encoder.encoder.") else 0.1) * tensor
    if len(shape) == 1:
        return 1 + 0.1 * tensor
    if "embed" in last or "embedding" in name:
        return tensor
    return tensor * (_gain(name, shape) / math.sqrt(_inputs(name, shape)))


def _inputs(name: str, shape: tuple[int, ...]) -> int:
    """How many numbers one output of a layer is a sum of."""
    if name.startswith("decoder.upsample.") and name.endswith(".0.conv.weight"):  # transposed, as long as its stride
        return shape[0]
    if name.startswith("decoder.decoder.") and name.endswith(".block.1.conv.weight"):  # twice as long
        return 2 * shape[0]
    return math.prod(shape[1:])


def _gain(name: str, shape: tuple[int, ...]) -> float:
    """Chosen so that codes differ from frame to frame, one is likelier than others, and audio is not clipped."""
    if "lm_head" in name or "codec_head" in name:
        return 3.0
    if name.startswith("encoder.encoder."):
        return 1.8
    if name.startswith("encoder.quantizer."):
        return 0.5
    if name.startswith("decoder.decoder."):
        return 0.06 if shape[0] == 1 else 0.3 if ".conv2." in name else 1.0
    return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Qwen3-TTS checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="custom-voice", help="what it can do (default: custom-voice)")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="default: tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the weights are made, such as cuda (default: cpu)")
    parser.add_argument("--endless", action="store_true", help="requests run to their bound, for measurements")
    options = parser.parse_args()
    try:
        write_checkpoint(
            options.folder,
            kind=options.kind,
            size_name=options.size,
            seed=options.seed,
            device=options.device,
            endless=options.endless,
        )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
