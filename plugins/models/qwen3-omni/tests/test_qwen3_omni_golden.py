"""The golden files are worth comparing with, are what the reference says, and bear out ``FACTS.md``."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from qwen3_omni_cases import CASES

GOLDEN = Path(__file__).parent / "golden"
EOS, CODES = 358, 256


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


def test_there_is_one_file_per_case_and_they_are_small():
    assert {file.stem for file in GOLDEN.glob("*.safetensors")} == set(CASES)
    assert sum(file.stat().st_size for file in GOLDEN.iterdir() if file.is_file()) < 1.5e6
    assert {case.speaker.lower() for case in CASES.values()} == {"chelsie", "ethan", "aiden"}


@pytest.mark.parametrize("name", CASES)
def test_codes_and_text_vary_over_time(golden, golden_tensors, name):
    codes = golden_tensors(name)["codes"]
    assert codes.shape == (golden("cases")[name]["frames"], 16) and codes.min() >= 0 and codes.max() < CODES
    assert all(len(group.unique()) > len(group) / 2 for group in codes.T)
    assert len(set(golden("cases")[name]["text_ids"])) > 2


@pytest.mark.parametrize("name", CASES)
def test_audio_is_neither_silent_nor_clipped(golden_tensors, name):
    audio = golden_tensors(name)["audio"]
    assert audio.std() > 0.05 and (audio.abs() == 1).float().mean() < 1e-3


def test_one_request_ends_by_itself_and_the_others_at_their_bound(golden_tensors):
    ended = {name for name in CASES if golden_tensors(name)["tokens"][-1] == EOS}
    assert ended == {"text"} and len(golden_tensors("text")["codes"]) < CASES["text"].frames
    assert all(len(golden_tensors(name)["codes"]) == CASES[name].frames for name in CASES if name not in ended)


@pytest.mark.parametrize("name", ["stopped", "image"])
def test_the_reference_says_so(reference, golden, golden_tensors, name):
    inputs, sequence, wave = reference.run(CASES[name])
    said = golden("cases")[name]
    assert inputs["input_ids"][0].tolist() == said["prompt_ids"]
    assert sequence.tolist() == said["prompt_ids"] + said["text_ids"]
    assert torch.equal(reference.talker.sequences[0].to(torch.int32), golden_tensors(name)["tokens"])
    torch.testing.assert_close(wave, golden_tensors(name)["audio"], atol=1e-5, rtol=0)


# Facts


def project(mlp, rows):
    """``Qwen3OmniMoeTalkerResizeMLP``."""
    return mlp.linear_fc2(torch.nn.functional.silu(mlp.linear_fc1(rows)))


@pytest.fixture(scope="module")
def parts(reference):
    """The talker, its rows of text tokens, and the configuration."""
    model = reference.model
    embed = model.thinker.model.embed_tokens
    return model.talker, lambda ids: project(model.talker.text_projection, embed(torch.tensor(ids))), model.config


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_is_the_users_turns_and_nine_rows(parts, golden, golden_tensors, name):
    talker, text_rows, config = parts
    said, tensors, spoken = golden("cases")[name], golden_tensors(name), config.talker_config
    prompt, text = said["prompt_ids"], said["text_ids"]
    starts = [*(i for i, token in enumerate(prompt) if token == config.im_start_token_id), len(prompt)]
    turns = [(a, b) for a, b in pairwise(starts) if prompt[a + 1] == config.user_token_id]
    kept = [position for a, b in turns for position in range(a, b)]
    assert said["talker_ids"] == [prompt[i] for i in kept] + [config.tts_pad_token_id] * 9
    rows = tensors["prompt_embeds"]
    media = {config.thinker_config.audio_token_id, spoken.image_token_id, spoken.video_token_id}
    for row, position in enumerate(kept):
        if prompt[position] not in media:
            torch.testing.assert_close(rows[row], text_rows([prompt[position]])[0], atol=1e-5, rtol=1e-5)
        elif "thinker_states" in tensors:
            expected = project(talker.hidden_projection, tensors["thinker_states"][position])
            torch.testing.assert_close(rows[row], expected, atol=1e-5, rtol=1e-5)
    pad, bos, eos = config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id
    expected = text_rows([*prompt[-3:], pad, pad, pad, pad, bos, text[0]])
    speaker = spoken.speaker_id[CASES[name].speaker.lower()]
    expected[3:] += talker.model.codec_embedding(torch.tensor([
        spoken.codec_nothink_id, spoken.codec_think_bos_id, spoken.codec_think_eos_id, speaker, spoken.codec_pad_id,
        spoken.codec_bos_id,
    ]))  # fmt: skip
    torch.testing.assert_close(rows[len(kept) :], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tensors["trailing_text"], text_rows([*text[1:-1], eos]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tensors["tts_pad_embed"], text_rows([pad])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_sum_of_its_codes_and_of_one_row_of_text(parts, golden_tensors, name):
    talker, tensors = parts[0], golden_tensors(name)
    codes, trailing = tensors["codes"].long(), tensors["trailing_text"]
    summed = talker.model.codec_embedding(codes[:, 0])
    for group, embedding in enumerate(talker.code_predictor.model.codec_embedding, start=1):
        summed = summed + embedding(codes[:, group])
    pads = tensors["tts_pad_embed"].expand(max(0, len(codes) - len(trailing)), -1)
    text = torch.cat([trailing[: len(codes)], pads])
    torch.testing.assert_close(tensors["step_embeds"], summed + text, atol=1e-5, rtol=1e-5)
    assert torch.equal(tensors["tokens"][:-1].long(), codes[:, 0])


@pytest.mark.parametrize("name", ["text", "video", "audio_in_video", "all_media_two_turns"])
def test_steps_are_one_causal_sequence_at_these_positions(parts, golden_tensors, name):
    talker, tensors = parts[0], golden_tensors(name)
    rows = torch.cat([tensors["prompt_embeds"], tensors["step_embeds"]])[None]
    positions = tensors["positions"].long()[:, None]
    assert positions.shape[-1] == rows.shape[1]
    states = talker.model(inputs_embeds=rows, position_ids=positions, use_cache=False).last_hidden_state[0]
    states = states[len(tensors["prompt_embeds"]) - 1 :]
    torch.testing.assert_close(states, tensors["hidden_states"], atol=1e-4, rtol=1e-4)
    logits = talker.codec_head(states[:3])
    torch.testing.assert_close(logits, tensors["logits"], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_scores_are_logits_with_a_penalty_on_own_codes_and_without_special_rows(golden_tensors, name):
    tensors = golden_tensors(name)
    for step, (logits, scores) in enumerate(zip(tensors["logits"], tensors["scores"], strict=True)):
        expected = logits.clone()
        seen = tensors["tokens"][:step].long().unique()
        expected[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.05, logits[seen] / 1.05)
        expected[[i for i in range(CODES, CODES + 1024) if i != EOS]] = -torch.inf
        torch.testing.assert_close(scores, expected)
        assert scores.argmax() == tensors["tokens"][step]


@pytest.mark.parametrize("name", ["text", "image"])
def test_the_code_predictor_is_one_causal_sequence_of_sixteen_rows(parts, golden_tensors, name):
    talker, tensors = parts[0], golden_tensors(name)
    predictor, codes = talker.code_predictor, tensors["codes"][0].long()
    first = talker.model.codec_embedding(codes[:1])
    torch.testing.assert_close(tensors["predictor_inputs"], torch.cat([tensors["hidden_states"][:1], first]))
    later = [predictor.model.codec_embedding[k](codes[k + 1 : k + 2]) for k in range(14)]
    rows = torch.cat([tensors["predictor_inputs"], *later])[None]
    states = predictor.model(inputs_embeds=rows, use_cache=False).last_hidden_state[0]
    logits = torch.stack([predictor.lm_head[k](states[k + 1]) for k in range(15)])
    torch.testing.assert_close(logits, tensors["predictor_logits"], atol=1e-3, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), codes[1:])


def test_positions_are_of_rows_unless_there_is_an_image_or_a_video(golden_tensors):
    for name in ("text", "system", "two_turns", "stopped", "audio", "audio_in_video"):
        positions = golden_tensors(name)["positions"]
        assert torch.equal(positions, torch.arange(positions.shape[1], dtype=torch.int32).expand(3, -1)), name


def test_positions_of_an_image(golden_tensors):
    """``<|im_start|>user\\n<|vision_start|>``, then 2 rows of 3, then on from the largest, every axis alike."""
    positions = golden_tensors("image")["positions"]
    assert positions[:, :4].tolist() == [[0, 1, 2, 3]] * 3
    assert positions[:, 4:10].tolist() == [[4] * 6, [4, 4, 4, 5, 5, 5], [4, 5, 6, 4, 5, 6]]
    assert torch.equal(positions[:, 10:], torch.arange(7, 36, dtype=torch.int32).expand(3, -1))


def test_positions_of_a_video_are_26_apart_in_time(golden_tensors):
    """13 a second, two seconds a pair of frames; 10 rows of 14 in each."""
    positions = golden_tensors("video")["positions"][:, 4 : 4 + 280]
    assert positions[0].tolist() == [4] * 140 + [30] * 140
    assert positions[1].tolist() == [4 + row for row in range(10) for _ in range(14)] * 2
    assert positions[2].tolist() == [4 + column for _ in range(10) for column in range(14)] * 2
    assert golden_tensors("video")["positions"][:, 284].tolist() == [31] * 3


def test_states_of_a_layer_are_before_what_the_vision_tower_adds(reference):
    """``hidden_states[k]`` is what layer ``k - 1`` gave; the first three layers' output is added to after that."""
    seen = {}
    layers = reference.model.thinker.model.layers
    hooks = [
        layer.register_forward_hook(lambda module, given, output, k=k: seen.setdefault(k + 1, output))
        for k, layer in enumerate(layers)
    ]
    entered = {}
    hooks += [
        layer.register_forward_pre_hook(lambda module, given, k=k: entered.setdefault(k, given[0]))
        for k, layer in enumerate(layers)
    ]
    reference.run(dataclasses.replace(CASES["image"], frames=1))
    for hook in hooks:
        hook.remove()
    states = reference.thinker.hidden_states[0]
    assert torch.equal(states[0], entered[0])
    assert all(torch.equal(states[k], seen[k]) for k in range(1, len(layers)))
    assert [k for k in range(1, len(layers)) if not torch.equal(states[k], entered[k])] == [1, 2, 3]


@pytest.mark.parametrize("name", CASES)
def test_every_frame_is_1920_samples_but_for_555(golden, name):
    said = golden("cases")[name]
    assert said["samples"] == said["frames"] * 1920 - 555


def test_text_of_one_token_cannot_be_spoken_by_the_reference(reference):
    with pytest.raises(RuntimeError, match="must match the size"):
        reference.run(dataclasses.replace(CASES["text"], thinker_tokens=1))


def test_an_answer_that_the_prompt_begins_is_spoken_from_its_beginning_but_cut(reference, parts):
    """The reference cuts text after as many rows as tokens were generated, which forgets those of the prompt."""
    _, text_rows, config = parts
    inputs = reference.prepare(CASES["text"])
    begun = reference.processor.tokenizer("So,")["input_ids"]
    ids = torch.cat([inputs["input_ids"], torch.tensor([begun])], dim=1)
    sequences, _ = reference.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), thinker_max_new_tokens=3, talker_max_new_tokens=2,
        talker_do_sample=False,
    )  # fmt: skip
    spoken = [*begun, *sequences[0, ids.shape[1] :].tolist()]
    bos = reference.model.talker.model.codec_embedding(torch.tensor(config.talker_config.codec_bos_id))
    first, trailing = reference.given["inputs_embeds"][0, -1], reference.given["trailing_text_hidden"][0]
    torch.testing.assert_close(first, text_rows(spoken[:1])[0] + bos)
    whole = [*spoken[1:-1], config.tts_eos_token_id]
    assert len(whole) == 5
    torch.testing.assert_close(trailing, text_rows([*whole[:3], config.tts_eos_token_id, config.tts_pad_token_id]))


def test_sampling_of_the_talker_is_that_of_the_code_predictor(reference):
    inputs = reference.prepare(CASES["text"])
    predictor = reference.model.talker.code_predictor
    with mock.patch.object(predictor, "generate", wraps=predictor.generate) as generate:
        reference.model.generate(**inputs, thinker_max_new_tokens=3, talker_max_new_tokens=2)
    given = generate.call_args.kwargs
    assert (given["do_sample"], given["top_k"], given["top_p"], given["max_new_tokens"]) == (True, 50, 0.8, 15)
    assert "temperature" not in given
