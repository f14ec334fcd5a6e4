"""A tiny Code2Wav of transformers with random weights, and checkpoints that hold it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_core.module.contract import ModuleContext
from omni_plugin_qwen3_omni.code2wav import Code2Wav, empty_network, fill_network

TINY = {
    "codebook_size": 32, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_quantizers": 16, "decoder_dim": 64,
}  # fmt: skip
"""1920 samples for a frame, as in the released checkpoints."""


def reference(seed=0, **changes) -> Qwen3OmniMoeCode2Wav:
    """In float32; every weight changes the sound, which is not clipped."""
    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**{**TINY, **changes})).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(_weight(name, torch.randn(parameter.shape, generator=generator)))
    return model


def _weight(name: str, noise: torch.Tensor) -> torch.Tensor:
    last, shape = name.rpartition(".")[2], noise.shape
    if last in ("scale", "gamma"):  # what a residual is scaled by
        return 0.5 + 0.1 * noise
    if last in ("bias", "alpha", "beta"):
        return 0.1 * noise
    if noise.ndim == 1:
        return 1 + 0.1 * noise
    if name.startswith("code_embedding"):
        return 4 * noise  # the mean of 16 has the size of one
    inputs, gain = math.prod(shape[1:]), 1.0
    if name.startswith("upsample.") and name.endswith(".0.conv.weight"):  # transposed, as long as its stride
        inputs = shape[0]
    elif name.endswith(".block.1.conv.weight"):  # twice as long
        inputs = 2 * shape[0]
    if name.startswith("decoder."):
        gain = 0.04 if shape[0] == 1 else 0.3 if ".conv2." in name else 1.0
    return noise * (gain / math.sqrt(inputs))


def network_of(model: Qwen3OmniMoeCode2Wav, dtype=torch.float32, device="cpu"):
    """The same weights as a ``CodecNetwork``."""
    return fill_network(empty_network(model.config), model.state_dict(), torch.device(device), dtype)


def codes_of(frames, seed=0, size=TINY["codebook_size"], groups=TINY["num_quantizers"]):
    return np.random.default_rng(seed).integers(0, size, (frames, groups), dtype=np.int32)


def whole_of(model: Qwen3OmniMoeCode2Wav, codes: np.ndarray) -> np.ndarray:
    """What the reference makes of all frames at once."""
    with torch.inference_mode():
        return model(torch.from_numpy(codes.astype(np.int64)).T[None])[0, 0].numpy()


def write_checkpoint(folder: Path, model: Qwen3OmniMoeCode2Wav, **config) -> Path:
    """Two shards, the first with tensors of other parts that no one is to read."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": "qwen3_omni_moe", "code2wav_config": model.config.to_dict(), **config}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    own = {f"code2wav.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    others = {"thinker.model.norm.weight": torch.full((4,), torch.nan), "talker.codec_head.weight": torch.zeros(2, 2)}
    index = {}
    for number, tensors in enumerate((others, own), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return folder


def load(folder: Path, dtype=torch.float32, **options) -> Code2Wav:
    return Code2Wav.load(ModuleContext(folder, torch.device("cpu"), dtype, options))


def push(decoder: Code2Wav, states, chunks, **more):
    """A step of sessions through the module's own entry."""
    inputs = [{"codes": chunk, **more} for chunk in chunks]
    (key,) = {decoder.batch_key(state, values) for state, values in zip(states, inputs, strict=True)}
    assert key[0] == len(chunks[0])
    return [output.get("audio") for output in decoder.step(states, inputs)]


def stream(decoder: Code2Wav, codes, chunks):
    """All of ``codes`` in chunks of the given sizes, the last of which may be cut."""
    state, parts, begin = decoder.open({}), [], 0
    for size in chunks:
        if begin < len(codes):
            parts.append(push(decoder, [state], [codes[begin : begin + size]])[0])
            begin = min(begin + size, len(codes))
    assert begin == len(codes) == state.position
    decoder.close(state)
    return np.concatenate(parts)


def worst(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max())
