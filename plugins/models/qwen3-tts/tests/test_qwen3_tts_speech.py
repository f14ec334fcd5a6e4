"""What requests become: the golden jobs, defaults, and refusals that say what there is."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from talker_support import golden_prompt

from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError, RequestError
from omni_core.requests import parse_request
from omni_plugin_qwen3_tts.family import speech
from omni_plugin_qwen3_tts.requests import Qwen3TTSRequest
from omni_plugin_qwen3_tts.speech import FRAMES_AT_LEAST, FRAMES_PER_TOKEN

AUDIO = np.zeros(24000, np.float32)
EMBEDDING = np.linspace(-1, 1, 64, dtype=np.float32)
CODES = np.arange(48, dtype=np.int32).reshape(3, 16)


@pytest.fixture(scope="module")
def model_of(checkpoint_of):
    """A kind and a size to the front end's half."""
    import functools

    return functools.cache(lambda kind, size="tiny": speech(Checkpoint(checkpoint_of(kind, size))))


@pytest.fixture
def custom(model_of):
    return model_of("custom-voice")


@pytest.fixture
def design(model_of):
    return model_of("voice-design")


@pytest.fixture
def base(model_of):
    return model_of("base")


def ask(text="Hello, hello!", **fields):
    return parse_request(Qwen3TTSRequest, {"input": text, **fields})


def refused(model, **fields):
    """Why a request is refused, and the field at fault."""
    with pytest.raises(RequestError) as error:
        model.check(ask(**fields))
    return str(error.value), error.value.param


def job(model, reference=None, **fields):
    request = ask(**fields)
    model.check(request)
    return model.utterance(request, reference).job


def test_it_says_what_the_checkpoint_says(custom, design):
    assert (custom.sample_rate, custom.samples_per_frame, custom.num_code_groups) == (24000, 1920, 16)
    assert (custom.end_code, custom.stand_in) == (358, 356)
    assert "vivian" in custom.voices and len(custom.voices) == 9 and not design.voices


def test_golden_requests_become_the_golden_prompts(model_of, golden, golden_tensors):
    for name, case in golden("cases").items():
        model = model_of(case["kind"], "tiny-0.6b" if name == "base_same_width" else "tiny")
        tensors, reference = golden_tensors(name), None
        fields = {"language": case["language"], "non_streaming_mode": case["non_streaming_mode"], "seed": 5}
        fields |= {"voice": case["speaker"]} if "speaker" in case else {}
        fields |= {"instructions": case["instruct"]} if case.get("instruct") else {}
        if case["kind"] == "voice-design":
            fields["task_type"] = "VoiceDesign"
        if case["kind"] == "base":
            fields |= {"reference": AUDIO, "x_vector_only_mode": case["x_vector_only_mode"]}
            fields |= {"ref_text": case["ref_text"]} if case.get("ref_text") else {}
            reference = {"embedding": tensors["speaker_embedding"].numpy()}
            if not case["x_vector_only_mode"]:
                reference["codes"] = tensors["ref_codes"].numpy()
        request = ask(case["text"], **fields)
        model.check(request)
        utterance, expected = model.utterance(request, reference), golden_prompt(model.config, case, tensors)
        assert utterance.job.prompt == expected.rows, name
        assert (utterance.job.prompt_length, utterance.job.text) == (expected.length, expected.text), name
        assert utterance.job.seed == 5
        assert (utterance.before is None) == ("ref_codes" not in tensors), name


def test_defaults_are_the_checkpoint_s(custom):
    made = job(custom)
    assert (made.tokens.temperature, made.tokens.top_k, made.tokens.top_p) == (0.9, 50, 1.0)
    assert made.tokens.repetition_penalty == 1.05
    assert (made.codes.temperature, made.codes.top_k, made.codes.top_p) == (0.9, 50, 1.0)
    assert made.min_frames == 2
    assert made.text == (), "all of the text is in the prompt"


def test_other_defaults_of_a_checkpoint_hold(tmp_path, checkpoint_of):
    shutil.copytree(checkpoint_of("custom-voice"), tmp_path / "copy")
    file = tmp_path / "copy" / "generation_config.json"
    file.write_text(
        json.dumps({"do_sample": False, "top_k": 7, "subtalker_temperature": 0.5, "repetition_penalty": None})
    )
    model = speech(Checkpoint(tmp_path / "copy"))
    made = job(model)
    assert (made.tokens.temperature, made.tokens.top_k, made.tokens.repetition_penalty) == (0.0, 7, 1.05)
    assert made.codes.temperature == 0.5
    assert job(model, temperature=0.3).tokens.temperature == 0.3, "what is asked for comes first"


def test_a_penalty_that_no_float_can_divide_by_is_refused():
    """In float32 it would be 0, and what is drawn of such logits may be no code at all."""
    with pytest.raises(RequestError, match="repetition_penalty=1e-46"):
        ask(repetition_penalty=1e-46)


def test_sampling_that_is_asked_for_holds(custom):
    made = job(
        custom, temperature=0.0, top_k=3, top_p=0.5, repetition_penalty=1.0,
        subtalker_temperature=0.1, subtalker_top_k=4, subtalker_top_p=0.25,
    )  # fmt: skip
    assert (made.tokens.temperature, made.tokens.top_k, made.tokens.top_p) == (0.0, 3, 0.5)
    assert made.tokens.repetition_penalty == 1.0
    assert (made.codes.temperature, made.codes.top_k, made.codes.top_p) == (0.1, 4, 0.25)


# Tasks


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({}, "CustomVoice"),
        ({"voice": "ryan"}, "CustomVoice"),
        ({"instructions": "A deep voice."}, "CustomVoice"),
        ({"reference": AUDIO}, "Base"),
        ({"ref_text": "Hello"}, "Base"),
        ({"reference": AUDIO, "task_type": "CustomVoice"}, "CustomVoice"),
        ({"task_type": "VoiceDesign"}, "VoiceDesign"),
        ({"stored_voice": {"embedding": EMBEDDING}, "task_type": "CustomVoice"}, "Base"),
    ],
)
def test_the_task_is_inferred(fields, task):
    assert ask(**fields).task == task


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("custom-voice", {"task_type": "VoiceDesign", "instructions": "x"}, ("VoiceDesign", "custom_voice")),
        ("custom-voice", {"reference": AUDIO, "ref_text": "x"}, ("Base", "custom_voice")),
        ("voice-design", {"instructions": "x"}, ("CustomVoice", "voice_design", "give task_type 'VoiceDesign'")),
        ("base", {}, ("CustomVoice", "base")),
        ("base", {"task_type": "CustomVoice"}, ("CustomVoice", "base")),
    ],
)
def test_a_task_that_the_checkpoint_cannot_do_is_refused(model_of, kind, fields, named):
    message, param = refused(model_of(kind), **fields)
    assert param == "task_type" and all(words in message for words in named), message


def test_voices(custom, design, base):
    rows = [job(custom, **fields).prompt for fields in ({}, {"voice": ""}, {"voice": "default"}, {"voice": "Vivian"})]
    assert rows == [rows[0]] * 4 and job(custom, voice="ryan").prompt != rows[0]
    message, param = refused(custom, voice="alloy")
    assert param == "voice" and "'alloy'" in message and "serena, sohee, uncle_fu, vivian" in message
    message, param = refused(design, task_type="VoiceDesign", instructions="x", voice="alloy")
    assert param == "voice" and "no voices" in message
    message, param = refused(base, task_type="Base", voice="alloy", reference=AUDIO, ref_text="x")
    assert param == "voice" and "ref_audio" in message


def test_languages(custom):
    assert job(custom, language="Auto").prompt == job(custom).prompt != job(custom, language="GERMAN").prompt
    for language in ("klingon", "beijing_dialect"):
        message, param = refused(custom, language=language)
        assert param == "language" and "auto, chinese, english" in message and "dialect" not in message.split(";")[1]


def test_instructions(custom, design, base, model_of):
    assert job(custom, instructions="Slowly").prompt_length > job(custom).prompt_length
    assert job(custom, instructions=" ").prompt == job(custom, instructions="").prompt == job(custom).prompt
    message, param = refused(model_of("custom-voice", "tiny-0.6b"), instructions="Slowly")
    assert param == "instructions" and "0.6B" in message
    message, param = refused(base, reference=AUDIO, ref_text="x", instructions="Slowly")
    assert param == "instructions" and "Base" in message
    message, param = refused(design, task_type="VoiceDesign")
    assert param == "instructions" and "describe" in message
    assert job(design, task_type="VoiceDesign", instructions="").prompt_length > 1, "any voice"


# References


def test_what_a_reference_needs(base, custom):
    message, param = refused(base, task_type="Base")
    assert param == "ref_audio" and "ref_audio" in message
    message, param = refused(base, reference=AUDIO)
    assert param == "ref_text" and "x_vector_only_mode" in message
    message, param = refused(base, reference=AUDIO, ref_text=" \n")
    assert param == "ref_text"
    base.check(ask(reference=AUDIO, x_vector_only_mode=True))
    for fields in ({"reference": AUDIO}, {"ref_text": "x"}, {"x_vector_only_mode": True}):
        message, param = refused(custom, task_type="CustomVoice", **fields)
        assert param == {"reference": "ref_audio"}.get(*fields, next(iter(fields))) and "Base" in message


def test_what_the_reference_encoder_is_asked(base, custom):
    assert custom.reference_options(ask()) is None
    assert base.reference_options(ask(reference=AUDIO, ref_text="x")) == {"codes": True, "embedding": True}
    fields = {"reference": AUDIO, "ref_text": "x", "x_vector_only_mode": True}
    assert base.reference_options(ask(**fields)) == {"codes": False, "embedding": True}
    assert base.reference_options(ask(stored_voice={"embedding": EMBEDDING})) is None


def test_stored_voices(base):
    both = {"embedding": EMBEDDING, "codes": CODES}
    request = ask(stored_voice=both, ref_text="x")
    base.check(request)
    utterance = base.utterance(request, both)
    np.testing.assert_array_equal(utterance.before, CODES)
    assert utterance.job.text, "text goes with the frames unless it is asked for otherwise"
    alone = ask(stored_voice=both)
    base.check(alone)
    assert base.utterance(alone, both).before is None
    message, param = refused(base, stored_voice={"embedding": EMBEDDING}, ref_text="x")
    assert param == "ref_text" and "embedding alone" in message


def test_what_is_kept_of_a_voice_that_is_uploaded(base, custom):
    assert base.voice_options("Hello.") == {"codes": True, "embedding": True}
    assert base.voice_options(None) == base.voice_options(" ") == {"codes": False, "embedding": True}
    with pytest.raises(RequestError, match="CustomVoice model"):
        custom.voice_options("Hello.")


@pytest.mark.parametrize(
    ("embedding", "codes", "reason"),
    [
        (EMBEDDING[:32], CODES, "embedding"),
        (EMBEDDING * np.nan, CODES, "embedding"),
        (EMBEDDING, CODES[:, :8], "codes have the shape"),
        (EMBEDDING, CODES[:0], "codes have the shape"),
        (EMBEDDING, CODES + 256, "beyond"),
        (EMBEDDING, CODES - 1, "beyond"),
    ],
)
def test_voices_of_another_checkpoint_are_refused(base, embedding, codes, reason):
    stored = {"embedding": embedding, "codes": codes}
    with pytest.raises(RequestError, match=reason):
        base.utterance(ask(stored_voice=stored, ref_text="x"), stored)


# How long


def test_a_talker_that_finds_no_end_is_stopped(custom):
    assert job(custom, text="Hi", max_new_tokens=8192).max_frames == FRAMES_AT_LEAST
    assert job(custom, text="x" * 50, max_new_tokens=8192).max_frames == 50 * FRAMES_PER_TOKEN
    assert job(custom, text="Hi", max_new_tokens=3).max_frames == 3


def test_the_context_bounds_text_and_frames(custom, base):
    context = custom.talker.max_position_embeddings
    made = job(custom, text="x" * (context // 2 - 8), max_new_tokens=8192)
    assert made.max_frames == 8192 and made.prompt_length + made.max_frames <= context
    with pytest.raises(RequestError, match=r"16484 tokens, and 16384 fit into this model's context of 32768"):
        custom.check(ask("x" * (context // 2 + 100)))
    reference = {"embedding": EMBEDDING, "codes": np.zeros((context, 16), np.int32)}
    with pytest.raises(RequestError, match="ref_audio and input are too long together"):
        base.utterance(ask(reference=AUDIO, ref_text="x"), reference)


def test_usage_counts_text_and_instruction(custom):
    text, instruction = ask("Hi"), ask("Hi", instructions="Slowly")
    few, more = (custom.utterance(request, None).text_tokens for request in (text, instruction))
    assert few == 2 and more == 2 + len(custom.text.instruction("Slowly"))


@pytest.mark.parametrize("text", ["", " \n"])
def test_blank_text_is_refused(text):
    with pytest.raises(RequestError, match="input"):
        ask(text)


# Checkpoints


def test_incomplete_checkpoints_are_refused(tmp_path, checkpoint_of):
    shutil.copytree(checkpoint_of("custom-voice"), tmp_path / "copy")
    (tmp_path / "copy" / "speech_tokenizer" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no speech_tokenizer/config\.json"):
        speech(Checkpoint(tmp_path / "copy"))


def test_unknown_kinds_are_refused(tmp_path, checkpoint_of):
    shutil.copytree(checkpoint_of("custom-voice"), tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tts_model_type": "singer"}))
    with pytest.raises(CheckpointError, match="'singer'; there are custom_voice, voice_design, base"):
        speech(Checkpoint(tmp_path / "copy"))
