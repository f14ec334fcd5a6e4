"""Speech from Python without a server: the stages of a tiny checkpoint, against HTTP over the same stages."""

import base64
import gc

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from omni_core.audio import encode_sound
from omni_core.errors import ConfigError, RequestError, StageUnavailable
from omni_core.http.speech import SpeechService, speech_router
from omni_core.http.voices import VoiceStore

pytestmark = pytest.mark.serve

ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
SAY = {"voice": "vivian", "seed": 3, "max_new_tokens": 20}
ROUNDING = 1e-5
"""What sound differs by when it is decoded in chunks of other lengths, or beside others."""


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    from omni_core import Omni
    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint

    with Omni(write_checkpoint(tmp_path_factory.mktemp("custom-voice")), **ENGINE) as omni:
        yield omni


@pytest.fixture(scope="module")
def cloning(tmp_path_factory):
    from omni_core import Omni
    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint

    with Omni(write_checkpoint(tmp_path_factory.mktemp("base"), kind="base"), **ENGINE) as omni:
        yield omni


def over_http(omni, folder, text, **fields):
    """What a server over the same stages answers, as float32 samples."""

    async def ask():
        store = VoiceStore(folder, limit=1, checkpoint="x")
        app = FastAPI()
        app.include_router(speech_router(SpeechService(omni._omni.speech, store, ["m"], None)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            answer = await http.post("/v1/audio/speech", json={"input": text, "response_format": "pcm", **fields})
        store.close()
        assert answer.status_code == 200, answer.text
        return np.frombuffer(answer.content, "<i2").astype(np.float32) / 32767

    return omni._run(ask())


def assert_same(one, two, tolerance=ROUNDING):
    assert one.shape == two.shape and np.abs(one - two).max() <= tolerance


def test_speech_from_python_is_what_http_gives(omni, tmp_path):
    made = omni.speak("Hello, hello!", **SAY)
    assert made.samples.dtype == np.float32 and made.samples.ndim == 1 and made.sample_rate == 24_000
    assert made.finish_reason in ("stop", "length") and made.request.seed == 3
    assert len(made.samples) == made.seconds * made.sample_rate and len(made.samples) % 1920 == 0
    assert_same(made.samples, over_http(omni, tmp_path, "Hello, hello!", **SAY), 1.5 / 32767)
    other = omni.speak("Hello, hello!", **{**SAY, "seed": 4}).samples
    assert other.shape != made.samples.shape or np.abs(other - made.samples).max() > 0.01


def test_pieces_joined_are_the_whole(omni):
    pieces = list(omni.stream_speech("Hello, hello!", **SAY))
    assert len(pieces) > 2
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    whole = omni.speak("Hello, hello!", **SAY)
    assert pieces[-1].finish_reason == whole.finish_reason
    assert_same(np.concatenate([piece.samples for piece in pieces]), whole.samples)


def test_several_requests_run_together_and_each_is_as_it_is_alone(omni):
    requests = [{"text": f"Number {seed}.", **SAY, "seed": seed} for seed in range(6)]
    fields = [{"input": request.pop("text"), **request} for request in requests]
    engine, most = omni._omni.speech, [0]
    engine.on_end = lambda record: most.append(max(most[-1], engine.running + 1))
    together = omni.speak_many(fields)
    assert most[-1] > 1, "they came one after the other"
    for request, made in zip(fields, together, strict=True):
        alone = omni.speak(request["input"], **{k: v for k, v in request.items() if k != "input"})
        assert_same(made.samples, alone.samples)
        assert made.request.seed == request["seed"]


def test_leaving_the_pieces_early_aborts_the_work(omni):
    engine = omni._omni.speech
    cancelled = engine.ended["cancelled"]
    for piece in omni.stream_speech("On and on.", voice="vivian", seed=1, repetition_penalty=0.1, max_new_tokens=400):
        assert piece.finish_reason is None
        break
    gc.collect()
    assert engine.ended["cancelled"] == cancelled + 1 and engine.active == engine.running == 0
    assert len(omni.speak("Hello!", **SAY).samples)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"voise": "vivian"}, "did you mean 'voice'"),
        ({"voice": "nobody"}, "nobody"),
        ({"max_new_tokens": "7"}, "max_new_tokens='7'"),
        ({"stored_voice": {}}, "unknown parameter 'stored_voice'"),
        ({"ref_audio": "/no/such/file.wav"}, "ref_audio: .*No such file"),
        ({"ref_audio": 5}, "ref_audio must be a file of sound"),
        ({"response_format": "mp3"}, "unknown parameter 'response_format'"),
    ],
)
def test_a_bad_request_is_refused_when_it_is_made(omni, fields, message):
    for call in (omni.speak, omni.stream_speech):
        with pytest.raises(RequestError, match=message):
            call("Hello!", **fields)
    with pytest.raises(RequestError, match=message):
        omni.speak_many([{"input": "Hello!"}, {"input": "Hello!", **fields}])
    assert omni._omni.speech.active == 0


def test_a_model_that_speaks_makes_no_videos(omni):
    with pytest.raises(ConfigError, match="speaks and makes no videos: use speak"):
        omni.generate("a cat")
    with pytest.raises(ConfigError, match="speaks and makes no videos: use speak"):
        omni.generate_many([{"prompt": "a cat"}])


def test_a_voice_is_cloned_from_a_file_or_its_bytes_as_over_http(cloning, tmp_path):
    time = np.arange(24_000) / 24_000
    wav = encode_sound((0.3 * np.sin(2 * np.pi * 220 * time)).astype(np.float32), "wav", 24_000)
    (tmp_path / "me.wav").write_bytes(wav)
    fields = {"ref_text": "A tone.", "seed": 3, "max_new_tokens": 10}
    made = cloning.speak("Hello!", ref_audio=wav, **fields).samples
    for path in (tmp_path / "me.wav", str(tmp_path / "me.wav")):
        assert_same(cloning.speak("Hello!", ref_audio=path, **fields).samples, made)
    inline = base64.b64encode(wav).decode()
    assert_same(made, over_http(cloning, tmp_path, "Hello!", ref_audio=inline, **fields), 1.5 / 32767)


def test_a_closed_one_says_so_and_has_no_processes(cloning):
    """The last test of this one."""
    wav = encode_sound(np.sin(np.arange(24_000) / 20).astype(np.float32), "wav", 24_000)
    pieces = cloning.stream_speech("On.", ref_audio=wav, x_vector_only_mode=True, repetition_penalty=0.1)
    next(pieces)
    processes = [process for stage in cloning._omni.speech.stages() for process in _processes(stage)]
    assert len(processes) == 3 and all(process.is_alive() for process in processes)
    cloning.close()
    cloning.close()
    pieces.close()
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(StageUnavailable, match="this Omni is closed"):
        cloning.speak("Hello!")


def _processes(stage):
    engine = stage._engine
    return engine._processes if hasattr(engine, "_processes") else [engine.process]
