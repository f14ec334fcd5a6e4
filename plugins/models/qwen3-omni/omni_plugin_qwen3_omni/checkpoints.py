"""Random Qwen3-Omni checkpoints in the genuine layout: tiny ones, or one of genuine size. No network.

    python -m omni_plugin_qwen3_omni.checkpoints FOLDER --size tiny
    python -m omni_plugin_qwen3_omni.checkpoints FOLDER --size 30b-a3b --device cuda

They babble, but they go through every code path that a real checkpoint does: transformers' own classes and vLLM's
thinker load them. Names and shapes of the tensors are those of transformers' ``Qwen3OmniMoeForConditionalGeneration``,
with one tensor per expert and projection, as released checkpoints have them.

Where the numbers of ``30b-a3b`` are from: everything under ``text_config``, ``audio_config``, ``vision_config``,
``talker_config``, ``code_predictor_config`` and the token numbers from a public printout of the ``config.json`` of
Qwen3-Omni-30B-A3B-Instruct, where transformers 5.19's defaults differ (text: 28 layers, 28 heads, vocabulary 3584;
audio and vision: output of 3584; talker: ``norm_topk_prob`` false, 8 experts per token, 32 code groups, layer 18).
``code2wav_config`` is transformers' default. ``generation_config.json`` has the released file's five settings of the
talker. ``preprocessor_config.json`` has the released file's names and numbers. Shards of 5 GB are an assumption.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from omni_plugin_qwen3_omni.vocabulary import size as vocabulary_size
from omni_plugin_qwen3_omni.vocabulary import token_id, write_tokenizer

Named = Iterable[tuple[str, tuple[int, ...]]]

SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
CODEC_TOKENS = {
    "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
}  # fmt: skip
"""Rows of the talker's embedding in released checkpoints, whose codebooks have 2048 entries; these are no codes."""

TEXT_TOKENS = {
    "im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>", "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>", "tts_eos_token_id": "<tts_text_eod>", "system_token_id": "system",
    "user_token_id": "user", "assistant_token_id": "assistant",
}  # fmt: skip
MEDIA_TOKENS = {
    "audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>", "audio_end_token_id": "<|audio_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
}  # fmt: skip

GENERATION = {
    "talker_max_new_tokens": 4096, "talker_repetition_penalty": 1.05, "talker_temperature": 0.9, "talker_top_k": 50,
    "talker_top_p": 1.0,
}  # fmt: skip
PREPROCESSOR = {
    "chunk_length": 300, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128,
    "hop_length": 160, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.5, 0.5, 0.5], "max_pixels": 12845056, "merge_size": 2, "min_pixels": 3136, "n_fft": 400,
    "n_samples": 4800000, "nb_max_frames": 30000, "padding_side": "right", "padding_value": 0.0, "patch_size": 16,
    "processor_class": "Qwen3OmniMoeProcessor", "return_attention_mask": True, "sampling_rate": 16000,
    "temporal_patch_size": 2,
}  # fmt: skip

END_OF_SPEECH = 1.6
"""How much more the talker's end depends on its state than a code does, so that it comes after dozens of frames."""

GB = 1000**3


@dataclass(frozen=True)
class Size:
    """How large a checkpoint is.

    Attributes:
        text, audio, vision, talker, predictor, code2wav: what their configurations say about it.
        accept_hidden_layer: the thinker's layer whose input the talker is given of media.
        codebook: entries of a codebook. The talker's other tokens keep their distance to it.
        genuine: whether text has the numbers of Qwen's tokens.
        speaks: whether there are a talker and a code2wav.
        shard: bytes of a file of weights, at most.
    """

    text: Mapping[str, Any]
    audio: Mapping[str, Any]
    vision: Mapping[str, Any]
    talker: Mapping[str, Any]
    predictor: Mapping[str, Any]
    code2wav: Mapping[str, Any]
    accept_hidden_layer: int
    codebook: int = 2048
    genuine: bool = True
    speaks: bool = True
    shard: int = 5 * GB


def _layers(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


def _experts(experts: int, active: int, intermediate: int, shared: int, section: list[int]) -> dict[str, Any]:
    rope = {"interleaved": True, "mrope_section": section, "rope_type": "default", "type": "default"}
    return {
        "num_experts": experts, "num_experts_per_tok": active, "moe_intermediate_size": intermediate,
        "shared_expert_intermediate_size": shared, "rope_scaling": rope,
    }  # fmt: skip


def _audio(width: int, layers: int, heads: int, intermediate: int, channels: int, output: int) -> dict[str, Any]:
    return {
        "d_model": width, "encoder_layers": layers, "num_hidden_layers": layers, "encoder_attention_heads": heads,
        "encoder_ffn_dim": intermediate, "downsample_hidden_size": channels, "output_dim": output,
    }  # fmt: skip


def _vision(width: int, depth: int, heads: int, intermediate: int, taps: list[int], output: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "depth": depth, "num_heads": heads, "intermediate_size": intermediate,
        "deepstack_visual_indexes": taps, "out_hidden_size": output,
    }  # fmt: skip


_TINY: dict[str, Any] = {
    "text": {**_layers(128, 64, 6, 4, 2, 32), **_experts(8, 2, 64, 0, [6, 5, 5])},
    "audio": _audio(64, 2, 2, 128, 16, 128),
    "vision": {**_vision(64, 4, 2, 128, [0, 1, 2], 128), "num_position_embeddings": 256, "image_size": 256},
    "talker": {**_layers(64, 96, 3, 4, 2, 32), **_experts(8, 3, 32, 64, [6, 5, 5])},
    "predictor": _layers(64, 96, 3, 4, 2, 32),
    "code2wav": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "sliding_window": 8, "decoder_dim": 64,
    },
    "accept_hidden_layer": 4,
    "codebook": 256,
    "genuine": False,
    "shard": 2_000_000,
}  # fmt: skip

SIZES = {
    "tiny": Size(**_TINY),
    "tiny-thinking": Size(**_TINY, speaks=False),
    "30b-a3b": Size(
        text={**_layers(2048, 768, 48, 32, 4, 128), **_experts(128, 8, 768, 0, [24, 20, 20])},
        audio=_audio(1280, 32, 20, 5120, 480, 2048),
        vision={**_vision(1152, 27, 16, 4304, [8, 16, 24], 2048), "num_position_embeddings": 2304, "image_size": 768},
        talker={**_layers(1024, 2048, 20, 16, 2, 128), **_experts(128, 6, 384, 768, [24, 20, 20])},
        predictor=_layers(1024, 3072, 5, 16, 8, 128),
        code2wav={
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
            "num_key_value_heads": 16, "sliding_window": 72, "decoder_dim": 1536,
        },
        accept_hidden_layer=24,
    ),
}  # fmt: skip
"""``tiny`` is like Instruct; ``tiny-thinking`` like Thinking and Captioner, which have the thinker alone."""


def model_config(size_name: str = "tiny") -> dict[str, Any]:
    """What ``config.json`` says of a checkpoint of ``SIZES``."""
    wanted = SIZES[size_name]
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16",
        "enable_audio_output": wanted.speaks,
        **_ids(TEXT_TOKENS, wanted),
        "thinker_config": _thinker_config(wanted),
    }
    if wanted.speaks:
        config |= {"talker_config": _talker_config(wanted), "code2wav_config": _code2wav_config(wanted)}
    return config


def _ids(tokens: Mapping[str, str], wanted: Size) -> dict[str, int]:
    return {field: token_id(token, genuine=wanted.genuine) for field, token in tokens.items()}


_DECODER = {
    "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000, "attention_bias": False,
    "attention_dropout": 0.0, "use_cache": True, "use_sliding_window": False, "sliding_window": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_MOE = {
    **_DECODER, "max_position_embeddings": 65536, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip


def _thinker_config(wanted: Size) -> dict[str, Any]:
    rope = {**wanted.text["rope_scaling"], "mrope_interleaved": True}
    return {
        "model_type": "qwen3_omni_moe_thinker",
        "dtype": "bfloat16",
        "audio_config": {
            **wanted.audio, "model_type": "qwen3_omni_moe_audio_encoder", "num_mel_bins": 128, "n_window": 50,
            "n_window_infer": 800, "conv_chunksize": 500, "max_source_positions": 1500, "activation_function": "gelu",
            "activation_dropout": 0, "attention_dropout": 0, "dropout": 0, "scale_embedding": False,
        },
        "text_config": {
            **_MOE, **wanted.text, "model_type": "qwen3_omni_moe_text", "rope_scaling": rope, "use_qk_norm": True,
            "vocab_size": vocabulary_size(genuine=wanted.genuine),
        },
        "vision_config": {
            **wanted.vision, "model_type": "qwen3_omni_moe_vision_encoder", "apply_vit_abs_pos_embed": True,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "in_chans": 3, "patch_size": 16,
            "spatial_merge_size": 2, "spatial_patch_size": 16, "temporal_patch_size": 2, "tokens_per_second": 2,
        },
        **_ids({**MEDIA_TOKENS, "user_token_id": "user", "vision_end_token_id": "<|vision_end|>"}, wanted),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }  # fmt: skip


def _talker_config(wanted: Size) -> dict[str, Any]:
    offset = 2048 - wanted.codebook
    return {
        "model_type": "qwen3_omni_moe_talker",
        "text_config": {
            **_MOE, **wanted.talker, "model_type": "qwen3_omni_moe_talker_text", "vocab_size": wanted.codebook + 1024,
        },
        "code_predictor_config": {
            **_DECODER, **wanted.predictor, "model_type": "qwen3_omni_moe_talker_code_predictor",
            "max_position_embeddings": 32768, "max_window_layers": 28, "num_code_groups": 16,
            "vocab_size": wanted.codebook,
        },
        **_ids(MEDIA_TOKENS, wanted),
        **{name: token - offset for name, token in CODEC_TOKENS.items()},
        "accept_hidden_layer": wanted.accept_hidden_layer,
        "num_code_groups": 16,
        "output_router_logits": False,
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "spatial_merge_size": 2,
        "speaker_id": {name: token - offset for name, token in SPEAKERS.items()},
        "thinker_hidden_size": wanted.text["hidden_size"],
    }  # fmt: skip


def _code2wav_config(wanted: Size) -> dict[str, Any]:
    return {
        **wanted.code2wav, "model_type": "qwen3_omni_moe_code2wav", "codebook_size": wanted.codebook,
        "num_quantizers": 16, "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "hidden_act": "silu",
        "rms_norm_eps": 1e-05, "rope_theta": 10000, "max_position_embeddings": 8000, "attention_bias": False,
        "attention_dropout": 0.0, "layer_scale_initial_scale": 0.01,
    }  # fmt: skip


def model_tensors(config: Mapping[str, Any]) -> Named:
    """Names and shapes of a checkpoint's tensors, in the order of its files.

    transformers keeps the experts of a layer in two tensors, ``gate_up_proj`` ``[E, 2 * I, H]`` and ``down_proj``
    ``[E, H, I]``; in the files each expert has three, and transformers joins them when it loads.
    """
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**json.loads(json.dumps(config))))
    for name, tensor in model.state_dict().items():
        prefix, experts, projection = name.partition(".mlp.experts.")
        if not experts:
            yield name, tuple(tensor.shape)
            continue
        count, outputs, inputs = tensor.shape
        halves = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for index in range(count):
            for half in halves:
                yield f"{prefix}{experts}{index}.{half}.weight", (outputs // len(halves), inputs)


def write_checkpoint(
    folder: Path, *, size_name: str = "tiny", seed: int = 0, device: str = "cpu", endless: bool = False
) -> Path:
    """Write a checkpoint in bfloat16.

    Args:
        folder: where to.
        size_name: one of ``SIZES``.
        seed: of the weights, which depend on the device too.
        device: where the weights are made; memory for one file of them is needed there and on the host.
        endless: the end of speech is never among the likeliest codes, so that requests run to their bound.
    """
    wanted, config = SIZES[size_name], model_config(size_name)
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", GENERATION)
    _write_json(folder / "preprocessor_config.json", PREPROCESSOR)
    _write_json(folder / "chat_template.json", {"chat_template": template})
    write_tokenizer(folder, genuine=wanted.genuine, chat_template=template)
    end = config["talker_config"]["codec_eos_token_id"] if wanted.speaks else None
    scaled = {} if end is None else {"talker.codec_head.weight": (end, 0.0 if endless else END_OF_SPEECH)}
    _write_weights(folder, model_tensors(config), torch.Generator(device).manual_seed(seed), wanted.shard, scaled)
    return folder


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, named: Named, generator: torch.Generator, limit: int, scaled: Mapping[str, tuple[int, float]]
) -> None:
    """Write shards one after another, and the index that says which tensor is in which.

    ``scaled``: by tensor, a row and what it is multiplied by.
    """
    shards = list(_shards(named, limit))
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: random_tensor(name, shape, generator).to(torch.bfloat16) for name, shape in shard}
        for name in tensors.keys() & scaled.keys():
            row, factor = scaled[name]
            tensors[name][row] *= factor
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    _write_json(folder / "model.safetensors.index.json", content)


def _shards(named: Named, limit: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """What fits into a file each, of ``limit`` bytes at two a number."""
    shard: list[tuple[str, tuple[int, ...]]] = []
    filled = 0
    for name, shape in named:
        needed = 2 * math.prod(shape)
        if shard and filled + needed > limit:
            yield shard
            shard, filled = [], 0
        shard.append((name, shape))
        filled += needed
    yield shard


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor that keeps the size of what passes through it, and differs from what is neutral.

    Returns:
        float32 on the generator's device.
    """
    tensor = torch.empty(shape, device=generator.device).normal_(generator=generator)
    last = name.rpartition(".")[2]
    if last in ("scale", "gamma"):  # what a residual is scaled by
        return 0.5 + 0.1 * tensor
    if last in ("bias", "alpha", "beta"):
        return 0.1 * tensor
    if len(shape) == 1:
        return 1 + 0.1 * tensor
    if "embed" in name and "patch_embed" not in name:
        # 15 of the code predictor are added to one of the talker and one of text: together they weigh like one.
        return tensor * (0.25 if ".code_predictor." in name else 0.5 if "pos_embed" in name else 1.0)
    return tensor * (_gain(name, shape) / math.sqrt(_inputs(name, shape)))


def _inputs(name: str, shape: tuple[int, ...]) -> int:
    """How many numbers one output of a layer is a sum of."""
    if re.match(r"code2wav\.upsample\.\d+\.0\.conv\.weight", name):  # transposed, as long as its stride
        return shape[0]
    if re.match(r"code2wav\.decoder\.\d+\.block\.1\.conv\.weight", name):  # transposed, twice as long
        return 2 * shape[0]
    return math.prod(shape[1:])


def _gain(name: str, shape: tuple[int, ...]) -> float:
    """Chosen so that tokens and codes differ from step to step, some are likelier, and audio is not clipped."""
    if "lm_head" in name or "codec_head" in name:
        return 3.0
    if name.endswith(".mlp.gate.weight"):  # experts differ in weight
        return 2.0
    if name.startswith("code2wav.decoder."):
        return 0.06 if shape[0] == 1 else 0.3 if ".conv2." in name else 1.0
    if re.match(r"thinker\.(audio_tower\.(conv2d|proj)|visual\.merger)", name):  # what GELU takes away
        return 1.6
    if "_projection.linear_fc" in name:
        return 1.5
    return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Qwen3-Omni checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="default: tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the weights are made, such as cuda (default: cpu)")
    parser.add_argument("--endless", action="store_true", help="speech runs to its bound, for measurements")
    options = parser.parse_args()
    write_checkpoint(
        options.folder, size_name=options.size, seed=options.seed, device=options.device, endless=options.endless
    )


if __name__ == "__main__":
    main()
