"""The talker against the golden files: prompts and code predictor alone, and all codes through the engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from talker_support import RunningTalker, golden_prompt, greedy_job

CASES = json.loads((Path(__file__).parent / "golden" / "cases.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-5


def checkpoint_name(name):
    # The golden files do not say the size: one case is as wide in the predictor as in the talker.
    return CASES[name]["kind"], "tiny-0.6b" if name == "base_same_width" else "tiny"


CHECKPOINTS = sorted({checkpoint_name(name) for name in CASES})


# Without an engine


@pytest.fixture(scope="module")
def network_of(checkpoint_of):
    """A kind and a size to the checkpoint's configuration and talker, float32, in this process."""
    import functools

    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from omni_core.plugins.manager import get_manager
    from omni_core.vllm.activate import activate
    from omni_core.vllm.parallel import parallel_state
    from omni_plugin_qwen3_tts.config import Qwen3TTSConfig
    from omni_plugin_qwen3_tts.talker import Qwen3TTSTalker, stage_config

    manager = get_manager()
    manager.require(manager.family("qwen3-tts"), manager.platform("cpu"))
    activate()

    @functools.cache
    def load(kind, size):
        folder = checkpoint_of(kind, size)
        arguments = EngineArgs(
            model=str(folder), hf_overrides=stage_config, skip_tokenizer_init=True, dtype="float32", max_model_len=512
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            talker = Qwen3TTSTalker(vllm_config=config)
        weights = load_file(folder / "model.safetensors")
        assert talker.load_weights(iter(weights.items())) == {name for name, _ in talker.named_parameters()}
        talker.lm_head.quant_method.process_weights_after_loading(talker.lm_head)
        return Qwen3TTSConfig(**json.loads((folder / "config.json").read_text())), talker

    with parallel_state(), torch.inference_mode():
        yield load


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_has_the_reference_s_rows(network_of, golden_tensors, name):
    tensors = golden_tensors(name)
    config, talker = network_of(*checkpoint_name(name))
    prompt = golden_prompt(config, CASES[name], tensors)
    rows = talker.embed_prompt(prompt.rows)
    assert rows.shape == (prompt.length, 64)
    torch.testing.assert_close(rows, tensors["prompt_embeds"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_text_beside_frames_is_the_reference_s(network_of, golden_tensors, name):
    tensors = golden_tensors(name)
    config, talker = network_of(*checkpoint_name(name))
    text = golden_prompt(config, CASES[name], tensors).text
    expected = tensors["trailing_text"]
    if not text:  # the reference has a row of padding there, which follows the text anyway
        text, expected = (config.tts_pad_token_id,), tensors["tts_pad_embed"][None]
    torch.testing.assert_close(talker.embed_text(torch.tensor(text)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_code_predictor_s_logits_are_the_reference_s(network_of, golden_tensors, name):
    tensors = golden_tensors(name)
    _, talker = network_of(*checkpoint_name(name))
    seen = []

    def choose(logits, group, table):
        assert group == len(seen) + 1
        seen.append(logits)
        codes = logits.argmax(dim=-1)
        return codes, table[codes]

    hidden, first = tensors["hidden_states"], tensors["codes"][:, 0].long()
    codes = talker.predict_codes(hidden, first, choose)
    assert torch.equal(codes, tensors["codes"].long())
    logits = torch.stack([logits[0] for logits in seen])
    torch.testing.assert_close(logits, tensors["predictor_logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_first_codes_are_the_reference_s(network_of, golden_tensors, name):
    tensors = golden_tensors(name)
    _, talker = network_of(*checkpoint_name(name))
    steps = len(tensors["logits"])
    logits = talker.compute_logits(tensors["hidden_states"][:steps])
    allowed = torch.isfinite(logits)
    torch.testing.assert_close(logits[allowed], tensors["logits"][allowed], atol=TOLERANCE, rtol=0)
    expected = torch.isfinite(tensors["scores"])
    expected[:, talker.end_code] = True  # which min_frames forbids, not the model
    assert torch.equal(allowed, expected)


def test_part_of_a_tensor_that_is_held_together_is_missed(network_of, checkpoint_of):
    _, talker = network_of("custom-voice", "tiny")
    weights = load_file(checkpoint_of("custom-voice") / "model.safetensors")
    del weights["talker.code_predictor.lm_head.3.weight"]
    with pytest.raises(ValueError, match="only some of the tensors for heads"):
        talker.load_weights(iter(weights.items()))
    network_of.cache_clear()


# Through the engine


@pytest.fixture(scope="module")
def talker(request, checkpoint_of):
    """The engine of a checkpoint, or of a folder that is made of one."""
    kind, size = request.param[:2]
    folder = checkpoint_of(kind, size)
    for change in request.param[2:]:
        folder = change(folder)
    talker = RunningTalker(folder)
    talker.cases = [name for name in CASES if checkpoint_name(name) == (kind, size)]
    yield talker
    talker.close()


def job_of(talker, name, golden_tensors):
    return greedy_job(golden_prompt(talker.config, CASES[name], golden_tensors(name)))


def reason_of(name):
    return "stop" if name == "voice_design_text_while_decoding" else "length"


each_checkpoint = pytest.mark.parametrize("talker", CHECKPOINTS, indirect=True, ids="-".join)


@pytest.mark.serve
@each_checkpoint
def test_codes_are_the_reference_s(talker, golden_tensors):
    for name in talker.cases:
        codes, reason = talker.run(talker.speak(job_of(talker, name, golden_tensors)))
        np.testing.assert_array_equal(codes, golden_tensors(name)["codes"], err_msg=name)
        assert reason == reason_of(name)


@pytest.mark.serve
@each_checkpoint
def test_they_are_in_a_batch_too(talker, golden_tensors):
    names = talker.cases * (-(-6 // len(talker.cases)))
    for name, (codes, reason) in zip(
        names, talker.speak_all([job_of(talker, name, golden_tensors) for name in names]), strict=True
    ):
        np.testing.assert_array_equal(codes, golden_tensors(name)["codes"], err_msg=name)
        assert reason == reason_of(name)


@pytest.mark.serve
@each_checkpoint
@pytest.mark.parametrize("size", [1, 5])
def test_they_are_with_text_in_pieces_too(talker, golden_tensors, size):
    async def one(name):
        job = job_of(talker, name, golden_tensors)
        pieces = [job.text[begin : begin + size] for begin in range(0, len(job.text), size)]
        return await talker.speak(replace(job, text=()), pieces)

    async def work():
        return await asyncio.gather(*(one(name) for name in talker.cases))

    for name, (codes, reason) in zip(talker.cases, talker.run(work()), strict=True):
        np.testing.assert_array_equal(codes, golden_tensors(name)["codes"], err_msg=name)
        assert reason == reason_of(name)


@pytest.mark.serve
@each_checkpoint
def test_they_are_for_a_slow_client_too(talker, golden_tensors):
    """Frames that wait are joined; equal codes in one frame stay two."""

    async def work():
        return await asyncio.gather(*(talker.speak(job_of(talker, n, golden_tensors), pause=0.5) for n in talker.cases))

    for name, (codes, reason) in zip(talker.cases, talker.run(work()), strict=True):
        expected = golden_tensors(name)["codes"].numpy()
        np.testing.assert_array_equal(codes, expected, err_msg=name)
        assert reason == reason_of(name)
    assert any(len(set(frame)) < len(frame) for frame in expected.tolist())


def difference(talker, job, tensors):
    """How much of a job's codes is not the reference's."""
    expected = tensors["codes"].numpy()
    codes, _ = talker.run(talker.speak(job))
    length = min(len(codes), len(expected))
    return 1 - (codes[:length] == expected[:length]).mean()


@pytest.mark.serve
@pytest.mark.parametrize("talker", [("custom-voice", "tiny")], indirect=True, ids=["custom-voice"])
def test_another_speaker_says_something_else(talker, golden_tensors):
    case, tensors = CASES["custom_voice"], golden_tensors("custom_voice")
    own, other = (golden_prompt(talker.config, {**case, **change}, tensors) for change in ({}, {"speaker": "serena"}))
    assert difference(talker, greedy_job(own), tensors) == 0
    assert difference(talker, greedy_job(other), tensors) > 0.3


def _without_a_layer(folder):
    """The last layer adds nothing."""
    changed = folder.with_name(f"{folder.name}-dropped")
    shutil.copytree(folder, changed)
    weights = load_file(folder / "model.safetensors")
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"talker.model.layers.2.{part}.weight"].zero_()
    save_file(weights, changed / "model.safetensors")
    return changed


def _of_another_seed(folder):
    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint

    return write_checkpoint(folder.with_name(f"{folder.name}-seed"), kind="custom-voice", seed=1)


@pytest.mark.serve
@pytest.mark.parametrize(
    "talker",
    [("custom-voice", "tiny", _without_a_layer), ("custom-voice", "tiny", _of_another_seed)],
    indirect=True,
    ids=["layer", "seed"],
)
def test_other_weights_say_something_else(talker, golden_tensors):
    job = job_of(talker, "custom_voice", golden_tensors)
    assert difference(talker, job, golden_tensors("custom_voice")) > 0.3
