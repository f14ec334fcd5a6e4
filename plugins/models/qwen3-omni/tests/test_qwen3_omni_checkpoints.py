"""The builder of random checkpoints writes what transformers and vLLM load."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

from omni_plugin_qwen3_omni import checkpoints
from omni_plugin_qwen3_omni.checkpoints import model_config, model_tensors
from omni_plugin_qwen3_omni.vocabulary import SPECIAL, token_id, write_tokenizer


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def stored(file):
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


@pytest.mark.parametrize("size", ["tiny", "tiny-thinking"])
def test_shards_hold_what_the_index_says_and_are_small(checkpoint_of, size):
    folder = checkpoint_of(size)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file.name: stored(file) for file in folder.glob("*.safetensors")}
    assert len(files) > 1 and files.keys() == set(index["weight_map"].values())
    held = {name: file for file, tensors in files.items() for name in tensors}
    assert held == index["weight_map"]
    tensors = {name: tensor for part in files.values() for name, tensor in part.items()}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == dict(model_tensors(model_config(size)))
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16} and all(t.isfinite().all() for t in tensors.values())
    assert sum(t.nbytes for t in tensors.values()) == index["metadata"]["total_size"] < 30e6


def test_experts_are_one_tensor_each_as_in_released_checkpoints():
    names = {name for name, _ in model_tensors(model_config("tiny"))}
    assert "thinker.model.layers.0.mlp.experts.7.gate_proj.weight" in names
    assert "talker.model.layers.2.mlp.experts.0.down_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)
    assert {name.partition(".")[0] for name in names} == {"thinker", "talker", "code2wav"}


def test_weights_depend_on_the_seed_alone(checkpoint_of, tmp_path):
    first = digests(checkpoint_of("tiny"))
    assert digests(checkpoints.write_checkpoint(tmp_path / "again")) == first
    other = digests(checkpoints.write_checkpoint(tmp_path / "other", seed=1))
    assert {name for name in first if other[name] != first[name]} == {n for n in first if n.endswith(".safetensors")}


def test_golden_files_are_of_this_checkpoint(checkpoint_of, golden):
    """Where this fails, the builder has changed: run ``golden/make_golden.py``."""
    assert digests(checkpoint_of("tiny")) == golden("versions")["tiny"]


@pytest.mark.parametrize("size", ["tiny", "tiny-thinking"])
def test_transformers_loads_every_tensor(checkpoint_of, size):
    model, loading = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        checkpoint_of(size), dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values())
    assert model.has_talker == hasattr(model, "talker") == hasattr(model, "code2wav") == (size == "tiny")


def test_experts_are_joined_as_transformers_joins_them(checkpoint_of, reference):
    folder, prefix = checkpoint_of("tiny"), "thinker.model.layers.1.mlp.experts."
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    gate, up = (
        stored(folder / index[f"{prefix}3.{half}.weight"])[f"{prefix}3.{half}.weight"].float()
        for half in ("gate_proj", "up_proj")
    )
    joined = reference.model.thinker.model.layers[1].mlp.experts.gate_up_proj[3]
    assert torch.equal(joined, torch.cat([gate, up]))


def test_thinking_has_no_talker(checkpoint_of):
    folder = checkpoint_of("tiny-thinking")
    config = AutoConfig.from_pretrained(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert config.enable_audio_output is False and {name.partition(".")[0] for name in index} == {"thinker"}
    said = json.loads((folder / "config.json").read_text())
    assert "talker_config" not in said and "code2wav_config" not in said


def test_genuine_size_has_the_known_numbers_of_tensors_and_parameters():
    sizes = [math.prod(shape) for _, shape in model_tensors(model_config("30b-a3b"))]
    assert (len(sizes), sum(sizes)) == (28010, 35_259_818_545)
    assert len(list(checkpoints._shards(model_tensors(model_config("30b-a3b")), 5 * checkpoints.GB))) == 15


@pytest.mark.parametrize("size", ["tiny", "30b-a3b"])
def test_tokens_are_where_the_configuration_says(tmp_path, size):
    genuine = size == "30b-a3b"
    write_tokenizer(tmp_path, genuine=genuine, chat_template="")
    tokenizer, config = AutoTokenizer.from_pretrained(tmp_path), model_config(size)
    thinker, talker = config["thinker_config"], config["talker_config"]
    for field, token in {**checkpoints.TEXT_TOKENS, **checkpoints.MEDIA_TOKENS}.items():
        said = config if field in config else thinker
        assert tokenizer.convert_tokens_to_ids(token) == said[field] == talker.get(field, said[field])
    assert max(tokenizer.get_vocab().values()) == token_id(SPECIAL[-1], genuine=genuine)
    assert max(tokenizer.get_vocab().values()) < thinker["text_config"]["vocab_size"]
    role = tokenizer("<|im_start|>assistant\n")["input_ids"]
    assert len(role) == 3 and (not genuine or role == [151644, 77091, 198])


@pytest.fixture(scope="module")
def rendered(checkpoint_of):
    """Messages and options to the prompt that they become."""
    processor = AutoProcessor.from_pretrained(checkpoint_of("tiny"))
    return lambda messages, **options: processor.apply_chat_template(messages, tokenize=False, **options)


USER = "<|im_start|>user\n"


def test_media_stand_where_they_are_said(rendered):
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "audio"}, {"type": "video"}]
    prompt = rendered([{"role": "user", "content": parts}], add_generation_prompt=True)
    vision = "<|vision_start|><|{}_pad|><|vision_end|>"
    audio = "<|audio_start|><|audio_pad|><|audio_end|>"
    assert prompt == (
        f"{USER}a{vision.format('image')}{audio}{vision.format('video')}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_there_is_no_system_turn_unless_one_is_given(rendered):
    user = {"role": "user", "content": "Hi"}
    assert rendered([user]) == f"{USER}Hi<|im_end|>\n"
    system = {"role": "system", "content": "S"}
    assert rendered([system, user]) == f"<|im_start|>system\nS<|im_end|>\n{USER}Hi<|im_end|>\n"


def test_tools_are_in_the_system_turn_and_their_answers_are_of_the_user(rendered):
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    prompt = rendered(
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    system, _, rest = prompt.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nS\n\n")
    assert '\n{"type": "function", "function": {"name": "f"}}\n' in system
    called = '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
    answers = "\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    assert rest == f"{USER}Hi<|im_end|>\n{called}<|im_start|>user{answers}"


def test_earlier_thoughts_are_left_out(rendered):
    said = {"role": "assistant", "content": "<think>\nlong\n</think>\n\nshort"}
    user = {"role": "user", "content": "Hi"}
    assert rendered([user, said, user]).count("<think>") == 0
    assert rendered([user, said]).endswith("<think>\nlong\n</think>\n\nshort<|im_end|>\n")
    assert rendered([user], add_generation_prompt=True, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
