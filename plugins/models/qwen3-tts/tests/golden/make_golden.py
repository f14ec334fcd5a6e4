"""Write the golden files beside this script: what the reference, ``qwen-tts`` 0.1.1, makes of our tiny checkpoints.

    python make_golden.py --builder /path/to/a/python/with/omni

It runs in an environment of its own, since the reference needs transformers 4.57.3; the checkpoints are written by the
other one. Everything is greedy, in float32 on the CPU with one thread, so that a second run writes the same files.
``README.md`` says what is in them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
NOT_NEEDED = ["sox", "onnxruntime", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"]
"""What the reference imports for its other tokenizer, of 25 Hz."""
PACKAGES = ("qwen-tts", "transformers", "tokenizers", "torch", "numpy", "librosa")

RATE = 24000
REPEATS = 7
"""Of the reference audio, for one that is longer than the encoder's window of 10 seconds."""
FRAMES = 24
CHUNK, CONTEXT = 10, 4
"""Of the chunked decoding, in frames."""

TEXT = "The rain in Spain stays mainly in the plain."
INSTRUCT = "Speak slowly, with a warm and low voice."
REF_TEXT = "A short reference."

CASES: dict[str, dict[str, Any]] = {
    "custom_voice": {
        "kind": "custom-voice", "text": TEXT, "speaker": "Vivian", "language": "English", "instruct": INSTRUCT,
        "non_streaming_mode": True,
    },
    "custom_voice_text_while_decoding": {
        "kind": "custom-voice", "text": "Hello, hello!", "speaker": "ryan", "language": "Auto", "instruct": None,
        "non_streaming_mode": False,
    },
    "custom_voice_dialect": {
        "kind": "custom-voice", "text": "\u4f60\u597d", "speaker": "Eric", "language": "Chinese", "instruct": None,
        "non_streaming_mode": True,
    },
    "voice_design": {
        "kind": "voice-design", "text": TEXT, "language": "Auto", "instruct": INSTRUCT, "non_streaming_mode": True,
    },
    "voice_design_text_while_decoding": {
        "kind": "voice-design", "text": TEXT, "language": "German", "instruct": INSTRUCT, "non_streaming_mode": False,
    },
    "base_x_vector": {
        "kind": "base", "text": TEXT, "language": "English", "x_vector_only_mode": True, "non_streaming_mode": False,
    },
    "base_in_context": {
        "kind": "base", "text": TEXT, "language": "English", "ref_text": REF_TEXT, "x_vector_only_mode": False,
        "non_streaming_mode": False,
    },
    "base_in_context_short_text": {
        "kind": "base", "text": "Yes.", "language": "Auto", "ref_text": "No.", "x_vector_only_mode": False,
        "non_streaming_mode": False,
    },
    "base_in_context_whole_text": {
        "kind": "base", "text": TEXT, "language": "English", "ref_text": REF_TEXT, "x_vector_only_mode": False,
        "non_streaming_mode": True,
    },
    "base_same_width": {
        "kind": "base", "size": "tiny-0.6b", "text": "Yes.", "language": "French", "x_vector_only_mode": True,
        "non_streaming_mode": True,
    },
}  # fmt: skip
WITH_AUDIO = ("custom_voice", "base_in_context")
SAMPLED = ("custom_voice",)
"""Cases whose scores are kept as they are when sampling, too: of the first token and of the first code that follows."""
LOGITS_STEPS = {"custom_voice": 6}
"""First steps whose logits are kept; one where the case is not named."""
SHAPES = [("base", "1.7b"), ("custom-voice", "0.6b"), ("base", "tiny"), ("base", "tiny-0.6b"), ("voice-design", "tiny")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--builder", required=True, help="a Python that has omni_plugin_qwen3_tts")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in NOT_NEEDED:
        _stub(name)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        digests: dict[str, dict[str, str]] = {}
        models: dict[tuple[str, str], Any] = {}
        for kind, size in dict.fromkeys((case["kind"], case.get("size", "tiny")) for case in CASES.values()):
            checkpoint = root / f"{kind}-{size}"
            _build(
                options.builder, "-m", "omni_plugin_qwen3_tts.checkpoints", checkpoint, "--kind", kind, "--size", size
            )
            digests[f"{kind} {size}"] = _digests(checkpoint)
            models[kind, size] = _load(checkpoint)
        with torch.inference_mode():
            audio = reference_audio()
            _save(options.out / "speech_tokenizer.safetensors", _speech_tokenizer(models["base", "tiny"], audio))
            _save(options.out / "speaker_encoder.safetensors", _speaker(models["base", "tiny"], audio))
            described = {}
            for name, case in CASES.items():
                model = models[case["kind"], case.get("size", "tiny")]
                tensors, described[name] = _case(model, name, audio)
                _save(options.out / f"{name}.safetensors", tensors)
        _write_json(options.out / "cases.json", described)
        (options.out / "shapes.json").write_text(_shapes(options.builder), encoding="utf-8")
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    _write_json(
        options.out / "versions.json", {"python": platform.python_version(), **versions, "checkpoints": digests}
    )


def reference_audio() -> np.ndarray:
    """A voice-like sound of 1.61 s, which is not a whole number of frames: float32 of int16 steps, 24 kHz."""
    time = np.arange(38700) / RATE
    pitch = 2 * np.pi * np.cumsum(120 + 40 * np.sin(2 * np.pi * 1.3 * time)) / RATE
    tone = sum(
        np.sin(k * pitch) * np.exp(-(((k * 120 - 700 - 500 * np.sin(5 * time)) / 600) ** 2)) for k in range(1, 24)
    )
    noise = np.random.default_rng(0).normal(size=time.shape) * 0.05
    wave = (tone * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * time)) + noise) * 0.15
    return (np.round(wave.clip(-1, 1) * 32767).astype(np.int16) / 32768).astype(np.float32)


def _stub(name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _build(python: str, *words: Any) -> str:
    return subprocess.run([python, *map(str, words)], check=True, capture_output=True, text=True).stdout


def _digests(checkpoint: Path) -> dict[str, str]:
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    return {str(f.relative_to(checkpoint)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _load(checkpoint: Path) -> Any:
    """The reference's own wrapper, with float32 weights.

    Its ``from_pretrained`` asks for a fix of Mistral's tokenizers, which by mistake changes how this one splits text
    where the checkpoint is a folder, and not where it is a repository. Here it is as in a repository.
    """
    from qwen_tts import Qwen3TTSModel
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration, Qwen3TTSProcessor
    from transformers import AutoProcessor

    model = Qwen3TTSForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    _check_weights(checkpoint, model)
    _check_weights(checkpoint / "speech_tokenizer", model.speech_tokenizer.model)
    AutoProcessor.register(Qwen3TTSConfig, Qwen3TTSProcessor, exist_ok=True)
    processor = AutoProcessor.from_pretrained(checkpoint)
    return Qwen3TTSModel(model=model, processor=processor, generate_defaults=model.generate_config)


def _check_weights(folder: Path, module: torch.nn.Module) -> None:
    """Every tensor of the module is in the file, and the other way round, and was loaded."""
    saved, state = load_file(folder / "model.safetensors"), module.state_dict()
    assert saved.keys() == state.keys(), sorted(saved.keys() ^ state.keys())
    for name, tensor in saved.items():
        assert torch.equal(tensor.float(), state[name]), name


def _shapes(builder: str) -> str:
    """Names and shapes of what the reference's classes save, one tensor per line."""
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    code = (
        "import json, sys; from omni_plugin_qwen3_tts.checkpoints import model_config, speech_tokenizer_config;"
        "pairs = json.loads(sys.argv[1]);"
        "print(json.dumps([[model_config(*pair), speech_tokenizer_config(pair[1])] for pair in pairs]))"
    )
    blocks = []
    for (kind, size), configs in zip(SHAPES, json.loads(_build(builder, "-c", code, json.dumps(SHAPES))), strict=True):
        with torch.device("meta"):
            model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**configs[0]))
            speech = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**configs[1]))
        for name, module in ((f"{kind} {size}", model), (f"speech_tokenizer {size}", speech)):
            lines = ",\n".join(f'  "{key}": {list(t.shape)}' for key, t in sorted(module.state_dict().items()))
            blocks.append(f'"{name}": {{\n{lines}\n}}')
    return "{\n" + ",\n".join(dict.fromkeys(blocks)) + "\n}\n"


def _speech_tokenizer(tts: Any, audio: np.ndarray) -> dict[str, torch.Tensor]:
    """Codes of audio, and audio of codes with what is between them."""
    tokenizer = tts.model.speech_tokenizer
    long = np.tile(audio, REPEATS)
    decoder = tokenizer.model.decoder
    codes = torch.randint(0, decoder.config.codebook_size, (1, 16, FRAMES), generator=torch.Generator().manual_seed(1))
    seen: dict[str, torch.Tensor] = {}
    parts = {
        "decoder.pre_conv": decoder.pre_conv,
        "decoder.pre_transformer": decoder.pre_transformer, "decoder.upsample_0": decoder.upsample[0][1],
        "decoder.upsample_1": decoder.upsample[1][1], "decoder.decoder_0": decoder.decoder[0],
        "decoder.decoder_1": decoder.decoder[1],
    }  # fmt: skip
    keep = {name: (lambda n: lambda module, inputs, output: seen.update({n: output}))(name) for name in parts}
    hooks = [module.register_forward_hook(keep[name]) for name, module in parts.items()]
    whole = decoder(codes)
    for hook in hooks:
        hook.remove()
    seen["decoder.pre_transformer"] = seen["decoder.pre_transformer"].last_hidden_state
    seen["decoder.decoder_1"] = seen["decoder.decoder_1"][..., :96]
    chunked = decoder.chunked_decode(codes, chunk_size=CHUNK, left_context_size=CONTEXT)
    return {
        "encoder.audio": torch.from_numpy(np.round(audio * 32768).astype(np.int16)),
        "encoder.codes": tokenizer.encode(audio, sr=RATE).audio_codes[0].to(torch.int32),
        "encoder.codes_of_long": tokenizer.encode(long, sr=RATE).audio_codes[0].to(torch.int32),
        "decoder.codes": codes[0].T.to(torch.int32),
        "decoder.quantized": decoder.quantizer.decode(codes)[0],
        **{name: output[0] for name, output in seen.items()},
        "decoder.audio": whole[0, 0],
        "decoder.audio_chunked": chunked[0, 0],
    }


def _speaker(tts: Any, audio: np.ndarray) -> dict[str, torch.Tensor]:
    """The mel spectrogram and the embedding of the reference audio."""
    from qwen_tts.core.models.modeling_qwen3_tts import mel_spectrogram

    mel = mel_spectrogram(
        torch.from_numpy(audio)[None], n_fft=1024, num_mels=128, sampling_rate=RATE, hop_size=256, win_size=1024,
        fmin=0, fmax=12000,
    )  # fmt: skip
    return {
        "mel": mel[0].T,
        "embedding": tts.model.extract_speaker_embedding(audio, RATE),
    }


class Recorder:
    """Calls of the reference's generation while it is entered, by what they were given and gave."""

    def __init__(self, tts: Any) -> None:
        self.model, self.talker = tts.model, tts.model.talker
        self.predictor_calls: list[tuple[torch.Tensor, Any]] = []

    def __enter__(self) -> Recorder:
        model_generate, talker_generate = self.model.generate, self.talker.generate
        predictor_generate, decode = self.talker.code_predictor.generate, self.model.speech_tokenizer.decode

        def generate(**arguments: Any) -> Any:
            self.arguments = arguments
            self.codes, self.hidden_states = model_generate(**arguments)
            return self.codes, self.hidden_states

        def generate_codes(**arguments: Any) -> Any:
            self.inputs = arguments
            self.result = talker_generate(**arguments, output_logits=True, output_scores=True)
            return self.result

        def generate_groups(**arguments: Any) -> Any:
            result = predictor_generate(**arguments, output_logits=True, output_scores=True)
            self.predictor_calls.append((arguments["inputs_embeds"], result))
            return result

        def decode_codes(encoded: Any) -> Any:
            self.decoded = encoded
            return decode(encoded)

        self.model.generate, self.talker.generate = generate, generate_codes
        self.talker.code_predictor.generate, self.model.speech_tokenizer.decode = generate_groups, decode_codes
        return self

    def __exit__(self, *_: Any) -> None:
        del self.model.generate, self.talker.generate
        del self.talker.code_predictor.generate, self.model.speech_tokenizer.decode


def _run(tts: Any, case: dict[str, Any], audio: np.ndarray, frames: int, **sampling: bool) -> Recorder:
    """One request; ``audio`` of the recorder is what came out. The last token drawn never becomes a frame."""
    methods = {
        "custom-voice": tts.generate_custom_voice, "voice-design": tts.generate_voice_design,
        "base": tts.generate_voice_clone,
    }  # fmt: skip
    arguments = {key: value for key, value in case.items() if key not in ("kind", "size")}
    if case["kind"] == "base":
        arguments["ref_audio"] = (audio, RATE)
    greedy = {"do_sample": False, "subtalker_dosample": False}
    with Recorder(tts) as seen:
        waves, _ = methods[case["kind"]](**arguments, **{**greedy, **sampling}, max_new_tokens=frames + 1)
    seen.audio = torch.from_numpy(waves[0])
    return seen


def _case(tts: Any, name: str, audio: np.ndarray) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """One greedy request: what the talker was given, what it and its code predictor said, and the audio."""
    case = CASES[name]
    seen = _run(tts, case, audio, FRAMES)
    steps = LOGITS_STEPS.get(name, 1)
    predictor_inputs, predictor = seen.predictor_calls[0]
    tensors = {
        "prompt_embeds": seen.inputs["inputs_embeds"][0],
        "trailing_text": seen.inputs["trailing_text_hidden"][0],
        "tts_pad_embed": seen.inputs["tts_pad_embed"][0, 0],
        "codes": seen.codes[0].to(torch.int32),
        "hidden_states": seen.hidden_states[0],
        "logits": torch.cat(seen.result.logits[:steps]),
        "scores": torch.cat(seen.result.scores[:steps]),
        "predictor_inputs": predictor_inputs[0],
        "predictor_logits": torch.cat(predictor.logits),
    }
    prompt = seen.arguments.get("voice_clone_prompt")
    if prompt is not None:
        tensors["speaker_embedding"] = prompt["ref_spk_embedding"][0]
        if prompt["ref_code"][0] is not None:
            tensors["ref_codes"] = prompt["ref_code"][0].to(torch.int32)
    if name in WITH_AUDIO:
        tensors["audio"] = seen.audio
    if name in SAMPLED:
        tensors["scores_sampled"] = _run(tts, case, audio, 1, do_sample=True).result.scores[0]
        _, predictor = _run(tts, case, audio, 1, subtalker_dosample=True).predictor_calls[0]
        tensors["predictor_scores_sampled"] = predictor.scores[0]
    talker = {k: v for k, v in seen.inputs.items() if not isinstance(v, torch.Tensor) and k != "suppress_tokens"}
    suppressed = seen.inputs["suppress_tokens"]
    described = {
        **case,
        "samples": len(seen.audio),
        "frames_decoded": len(seen.decoded[0]["audio_codes"]),
        "input_ids": seen.arguments["input_ids"][0][0].tolist(),
        **{key: _ids(seen.arguments.get(key)) for key in ("instruct_ids", "ref_ids")},
        "talker": talker,
        "suppressed": [suppressed[0], suppressed[-1], len(suppressed)],
    }
    return tensors, described


def _ids(values: Any) -> list[int] | None:
    return None if values is None or values[0] is None else values[0][0].tolist()


def _save(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, file)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
