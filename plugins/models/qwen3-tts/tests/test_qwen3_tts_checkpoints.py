"""The builder of random checkpoints writes what the reference would save."""

from __future__ import annotations

import hashlib
import math
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from omni_plugin_qwen3_tts import checkpoints
from omni_plugin_qwen3_tts.checkpoints import model_config, speech_tokenizer_config
from omni_plugin_qwen3_tts.config import Qwen3TTSConfig, Qwen3TTSTokenizer12HzConfig, register
from omni_plugin_qwen3_tts.layout import model_tensors, speech_tokenizer_tensors
from omni_plugin_qwen3_tts.vocabulary import SPECIAL, write_tokenizer

MODELS = [("base", "1.7b"), ("custom-voice", "0.6b"), ("base", "tiny"), ("base", "tiny-0.6b"), ("voice-design", "tiny")]


def shapes(named):
    return {name: list(shape) for name, shape in named}


def saved(file):
    """Names, shapes and types of the tensors in a file."""
    with safe_open(file, "pt") as tensors:
        loaded = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return {name: list(t.shape) for name, t in loaded.items()}, {t.dtype for t in loaded.values()}, loaded


@pytest.mark.parametrize(("kind", "size"), MODELS)
def test_a_model_has_the_reference_s_tensors(golden, kind, size):
    assert shapes(model_tensors(Qwen3TTSConfig(**model_config(kind, size)))) == golden("shapes")[f"{kind} {size}"]


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "tiny"])
def test_a_speech_tokenizer_has_the_reference_s_tensors(golden, size):
    config = Qwen3TTSTokenizer12HzConfig(**speech_tokenizer_config(size))
    assert shapes(speech_tokenizer_tensors(config)) == golden("shapes")[f"speech_tokenizer {size}"]


def test_genuine_sizes_have_the_known_numbers_of_tensors_and_parameters():
    def count(named):
        sizes = [math.prod(shape) for _, shape in named]
        return len(sizes), sum(sizes)

    assert count(model_tensors(Qwen3TTSConfig(**model_config("custom-voice", "0.6b")))) == (402, 905_788_672)
    config = Qwen3TTSTokenizer12HzConfig(**speech_tokenizer_config("0.6b"))
    assert count(speech_tokenizer_tensors(config)) == (496, 170_557_441)


@pytest.mark.parametrize(("kind", "size"), MODELS[2:])
def test_what_is_written_is_that_and_small(golden, checkpoint_of, kind, size):
    folder = checkpoint_of(kind, size)
    names, types, tensors = saved(folder / "model.safetensors")
    assert names == golden("shapes")[f"{kind} {size}"] and types == {torch.bfloat16}
    assert all(t.isfinite().all() for t in tensors.values())
    names, types, tensors = saved(folder / "speech_tokenizer" / "model.safetensors")
    assert names == golden("shapes")[f"speech_tokenizer {size}"] and types == {torch.float32}
    assert all(t.isfinite().all() for t in tensors.values())
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 10e6


def test_weights_depend_on_the_seed_alone(checkpoint_of, tmp_path):
    def digest(folder):
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

    first = digest(checkpoint_of("custom-voice"))
    assert digest(checkpoints.write_checkpoint(tmp_path / "again")) == first
    assert digest(checkpoints.write_checkpoint(tmp_path / "other", seed=1)) != first


@pytest.mark.parametrize("name", ["custom-voice tiny", "voice-design tiny", "base tiny", "base tiny-0.6b"])
def test_golden_files_are_of_these_checkpoints(golden, checkpoint_of, name):
    """Where this fails, the builder has changed: run ``golden/make_golden.py``."""
    folder = checkpoint_of(*name.split())
    files = {str(f.relative_to(folder)): f for f in folder.rglob("*") if f.is_file()}
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    assert digests == golden("versions")["checkpoints"][name]


def test_text_has_the_reference_s_tokens(golden, checkpoint_of):
    register()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_of("base"))
    for case in golden("cases").values():
        prompt = f"<|im_start|>assistant\n{case['text']}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer(prompt)["input_ids"] == case["input_ids"]
        assert tokenizer.decode(case["input_ids"]) == prompt
        if case.get("instruct"):
            assert tokenizer(f"<|im_start|>user\n{case['instruct']}<|im_end|>\n")["input_ids"] == case["instruct_ids"]
        if case.get("ref_text"):
            ids = tokenizer(f"<|im_start|>assistant\n{case['ref_text']}<|im_end|>\n")["input_ids"]
            assert ids == case["ref_ids"]


@pytest.mark.parametrize("genuine", [True, False])
def test_special_tokens_are_where_the_configuration_says(tmp_path, genuine):
    write_tokenizer(tmp_path, genuine=genuine)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    said = model_config("base", "1.7b" if genuine else "tiny")
    ids = [said[name] for name in ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id", "im_start_token_id")]
    assert tokenizer("<tts_pad><tts_text_bos><tts_text_eod><|im_start|>")["input_ids"] == ids
    assert max(tokenizer.get_vocab().values()) == tokenizer.convert_tokens_to_ids(SPECIAL[-1])
    assert max(tokenizer.get_vocab().values()) < said["talker_config"]["text_vocab_size"]
    role = tokenizer("<|im_start|>assistant\n")["input_ids"]
    assert len(role) == 3 and (not genuine or role == [151644, 77091, 198])


@pytest.mark.parametrize("size", ["tiny-0.6b", "0.6b"])
def test_what_does_not_exist_is_refused(monkeypatch, tmp_path, capsys, size):
    command = ["checkpoints", str(tmp_path / "out"), "--kind", "voice-design", "--size", size]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        checkpoints.main()
    assert "--size 1.7b or tiny" in capsys.readouterr().err and not (tmp_path / "out").exists()
