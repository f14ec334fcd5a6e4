"""Write the golden files beside this script: what transformers' Qwen3-Omni makes of our tiny checkpoint.

    python make_golden.py

Everything is greedy, in float32 on the CPU with one thread, so that a second run writes the same files. ``README.md``
says what is in them, and ``FACTS.md`` of this plugin how the reference comes to it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from qwen3_omni_cases import CASES, Case, audio, count, image, video  # noqa: E402

from omni_plugin_qwen3_omni.checkpoints import write_checkpoint  # noqa: E402

PACKAGES = ("transformers", "tokenizers", "torch", "torchvision", "numpy")
DEEP = ("text", "image", "audio")
"""Cases of which the thinker's states are kept too."""
STEPS = 3
"""First steps whose logits are kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "tiny")
        reference = Reference(checkpoint)
        digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(checkpoint.iterdir())}
        described = {}
        for name, case in CASES.items():
            tensors, described[name] = golden(reference, name, case)
            save_file({k: t.clone(memory_format=torch.contiguous_format) for k, t in tensors.items()},
                      options.out / f"{name}.safetensors")  # fmt: skip
    _write_json(options.out / "cases.json", described)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    _write_json(options.out / "versions.json", {"python": platform.python_version(), **versions, "tiny": digests})


class Reference:
    """transformers' model and processor, and what one request made of them.

    The talker asks its configuration for ``audio_config`` where a prompt has audio beside an image or a video, and its
    configuration has none: here it is the thinker's, which is what transformers 4.57 had in its code.
    """

    def __init__(self, checkpoint: Path) -> None:
        from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor

        self.processor = Qwen3OmniMoeProcessor.from_pretrained(checkpoint)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config
        self.text_steps: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.predictor_calls: list[tuple[torch.Tensor, Any]] = []
        self._record()

    def _record(self) -> None:
        """Keep what the three ``generate`` and the talker's model are given and give."""
        model, talker = self.model, self.model.talker
        thinker_generate, talker_generate = model.thinker.generate, talker.generate
        predictor_generate, talker_forward = talker.code_predictor.generate, talker.model.forward

        def generate_text(**arguments: Any) -> Any:
            self.thinker = thinker_generate(**arguments, output_logits=True)
            return self.thinker

        def generate_codes(**arguments: Any) -> Any:
            self.given = arguments
            self.talker = talker_generate(**arguments, output_logits=True, output_scores=True)
            return self.talker

        def generate_groups(**arguments: Any) -> Any:
            result = predictor_generate(**arguments, output_logits=True)
            self.predictor_calls.append((arguments["inputs_embeds"], result))
            return result

        def step(**arguments: Any) -> Any:
            result = talker_forward(**arguments)
            self.steps.append({**arguments, "result": result.last_hidden_state})
            return result

        model.thinker.generate, talker.generate = generate_text, generate_codes
        talker.code_predictor.generate, talker.model.forward = generate_groups, step

    def prepare(self, case: Case) -> dict[str, Any]:
        """What the processor makes of a request."""
        prompt = self.processor.apply_chat_template(list(case.messages), add_generation_prompt=True, tokenize=False)
        media = {
            kind: [made() for _ in range(count(case, part))] or None
            for kind, part, made in (("images", "image", image), ("audio", "audio", audio), ("videos", "video", video))
        }
        return self.processor(
            text=prompt, **media, use_audio_in_video=case.use_audio_in_video, cap_pixels_per_frame=False,
            return_tensors="pt",
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, case: Case) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        """One request: what the processor made of it, all tokens of text, and the audio ``[samples]``."""
        self.steps.clear()
        self.predictor_calls.clear()
        inputs = self.prepare(case)
        sequences, wave = self.model.generate(
            **inputs, speaker=case.speaker, return_audio=True, use_audio_in_video=case.use_audio_in_video,
            thinker_max_new_tokens=case.thinker_tokens, talker_max_new_tokens=case.frames + 1,
            thinker_eos_token_id=self.model.config.im_end_token_id if case.stop is None else case.stop,
            talker_do_sample=False,
        )  # fmt: skip
        return inputs, sequences[0], wave[0, 0]


def golden(reference: Reference, name: str, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and description of a case; ``README.md`` says which."""
    inputs, sequence, wave = reference.run(case)
    prompt = inputs["input_ids"].shape[1]
    talker, steps, calls = reference.talker, reference.steps, reference.predictor_calls
    codes = torch.cat([hidden[-1] for hidden in talker.hidden_states if hidden[-1] is not None])
    tensors = {
        "prompt_embeds": reference.given["inputs_embeds"][0],
        "trailing_text": reference.given["trailing_text_hidden"][0],
        "tts_pad_embed": reference.given["tts_pad_embed"][0, 0],
        "positions": torch.cat([step["position_ids"][1:, 0] for step in steps], dim=1).to(torch.int32),
        "step_embeds": torch.cat([step["inputs_embeds"][0] for step in steps[1:]]),
        "hidden_states": torch.cat([step["result"][0, -1:] for step in steps]),
        "codes": codes.to(torch.int32),
        "tokens": talker.sequences[0].to(torch.int32),
        "logits": torch.cat(talker.logits[:STEPS]),
        "scores": torch.cat(talker.scores[:STEPS]),
        "predictor_inputs": calls[0][0][0],
        "predictor_logits": torch.cat(calls[0][1].logits),
        "thinker_logits": torch.cat(reference.thinker.logits[:STEPS]),
        "audio": wave,
    }
    if name in DEEP:
        layers = reference.thinker.hidden_states
        accepted = reference.model.config.talker_config.accept_hidden_layer
        tensors["thinker_embeds"] = torch.cat([step[0][0] for step in layers])
        tensors["thinker_states"] = torch.cat([step[accepted][0] for step in layers])
    suppressed = reference.given["suppress_tokens"]
    described = {
        "prompt": reference.processor.tokenizer.decode(_collapsed(inputs["input_ids"][0].tolist())),
        "prompt_ids": sequence[:prompt].tolist(),
        "text_ids": sequence[prompt:].tolist(),
        "talker_ids": reference.given["talker_input_ids"][0].tolist(),
        "talker": {
            key: value for key, value in reference.given.items()
            if not isinstance(value, torch.Tensor) and key != "suppress_tokens"
        },
        "suppressed": [suppressed[0], suppressed[-1], len(suppressed)],
        **{key: inputs[key].tolist() for key in ("image_grid_thw", "video_grid_thw") if key in inputs},
        **{key: [float(n) for n in inputs[key]] for key in ("video_second_per_grid",) if key in inputs},
        "frames": len(codes),
        "samples": len(wave),
    }  # fmt: skip
    return tensors, described


def _collapsed(ids: list[int]) -> list[int]:
    """Without repetitions, which placeholders are."""
    return [token for index, token in enumerate(ids) if index == 0 or token != ids[index - 1]]


def _write_json(file: Path, content: Any) -> None:
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    file.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
