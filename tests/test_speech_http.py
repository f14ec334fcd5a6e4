"""The speech API over a real server with made-up stages: formats, streams, aborts, errors, voices, batches, sockets."""

import asyncio
import base64
import io
import json
import socket
import time
import wave
from contextlib import ExitStack

import av
import httpx
import numpy as np
import openai
import pytest
import websockets.exceptions
from speech_fakes import CLONED, PITCHES, RATE, SAMPLES, SpeechServer
from websockets.sync.client import connect

from omni_core.audio import FORMATS, encode_sound
from omni_core.errors import ConfigError, GenerationError, RequestError
from omni_core.http import speech_answers
from omni_core.http.voices import VoiceStore

SPEECH, BATCH, VOICES = "/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/voices"


def wait_for(predicate, seconds=10.0, what="it"):
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.01)
    return value


def sample(seconds=1.0, rate=RATE):
    return encode_sound((0.3 * np.sin(np.arange(int(seconds * rate)) / 9)).astype(np.float32), "wav", rate)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """``start(...)``: a server of the module's own; it runs until the module is done."""
    with ExitStack() as stack:

        def start(folder=None, **options):
            folder = folder or tmp_path_factory.mktemp("voices")
            server = stack.enter_context(SpeechServer(folder, **options).running())
            server.http = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            return server

        yield start


@pytest.fixture(scope="module")
def server(start):
    """A URL that begins with ``https://sound/`` is fetched: the rest of it is how many seconds it has."""

    async def fetch(url):
        if not url.startswith("https://sound/"):
            raise RequestError(f"cannot load {url}: not allowed")
        return sample(float(url.rpartition("/")[2]))

    return start(fetch=fetch, idle_seconds=2.5)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Whatever a test does, every place is free again, and no generation goes on."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        wait_for(lambda: server.engine.active == server.engine.running == 0, what="the end of all work")
        assert server.talker.begun == server.talker.left


@pytest.fixture
def speak(server):
    def speak(text="hello there", path=SPEECH, **fields):
        answer = server.http.post(path, json={"input": text, "seed": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer

    return speak


def decoded(data, name):
    if name == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / 32767, RATE
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [f.to_ndarray().reshape(-1) for frame in container.decode(stream) for f in resampler.resample(frame)]
        return np.concatenate(frames), stream.rate


def pitch_of(samples, rate=RATE):
    return np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate / len(samples)


def events_of(text):
    assert text.endswith("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")]


# The file


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_the_sound_that_was_made(speak, name, stream):
    answer = speak(voice="carol", response_format=name, stream=stream, frames=50)
    assert answer.headers["content-type"] == FORMATS[name].media_type
    assert ("content-length" in answer.headers) is not stream
    samples, rate = decoded(answer.content, name)
    assert len(samples) / rate == pytest.approx(1.0, abs=0.1)
    assert pitch_of(samples, rate) == pytest.approx(PITCHES["carol"], abs=3)


def test_mp3_is_the_default_as_it_is_openais(speak):
    assert speak().headers["content-type"] == "audio/mpeg"


@pytest.mark.parametrize("name", ["pcm", "wav", "flac"])
@pytest.mark.parametrize("fields", [{}, {"sample_rate": 8000}, {"sample_rate": 48000}, {"speed": 0.5}, {"speed": 1.7},
                                    {"speed": 4.0, "sample_rate": 16000}], ids=str)  # fmt: skip
def test_streamed_pieces_are_the_whole(speak, name, fields):
    streamed, whole = (speak(response_format=name, stream=stream, frames=70, **fields) for stream in (True, False))
    (one, rate), (other, _) = decoded(streamed.content, name), decoded(whole.content, name)
    assert np.array_equal(one, other)
    rate = fields.get("sample_rate", RATE)
    assert streamed.headers["x-sample-rate"] == whole.headers["x-sample-rate"] == str(rate)
    assert len(one) / rate == pytest.approx(70 * SAMPLES / RATE / fields.get("speed", 1), abs=0.1)


def test_a_wav_has_its_header_once(speak):
    streamed, whole = (speak(response_format="wav", stream=stream, frames=70).content for stream in (True, False))
    assert streamed.count(b"RIFF") == streamed.count(b"data") == 1 and streamed[4:8] == streamed[40:44] == b"\xff" * 4
    assert streamed[44:] == whole[44:]
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getframerate(), file.getnframes()) == (RATE, 70 * SAMPLES)


def test_a_seed_gives_the_same_again_and_is_told(speak, server):
    answer = server.http.post(SPEECH, json={"input": "x", "response_format": "pcm"})
    again = speak("x", response_format="pcm", seed=int(answer.headers["x-seed"]))
    assert again.content == answer.content != speak("x", response_format="pcm", seed=1).content


def test_a_whole_file_says_how_it_ended_and_what_it_took(speak):
    headers = speak("one two three", stream=False, frames=20).headers
    assert [headers[f"x-{name}"] for name in ("input-tokens", "output-tokens", "total-tokens", "finish-reason")] == [
        "3", "20", "23", "stop",
    ]  # fmt: skip
    assert speak(stream=False, frames=20, max_new_tokens=10).headers["x-finish-reason"] == "length"


def test_events_bring_the_file_and_its_usage(speak):
    answer = speak("one two", stream_format="sse", response_format="wav", frames=50)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *deltas, done = events_of(answer.text)
    assert len(deltas) >= 3 and {event["type"] for event in deltas} == {"speech.audio.delta"}
    whole = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert whole == speak("one two", response_format="wav", frames=50).content
    usage = {"input_tokens": 2, "output_tokens": 50, "total_tokens": 52}
    assert done == {"type": "speech.audio.done", "usage": usage, "finish_reason": "stop"}


@pytest.mark.parametrize(
    "fields", [{"response_format": name} for name in FORMATS] + [{"stream_format": "sse"}], ids=str
)
def test_sound_comes_long_before_the_end(server, fields):
    body = {"input": "x", "frames": 60, "frame_seconds": 0.02, **fields}
    begin, times = time.monotonic(), []
    with server.http.stream("POST", SPEECH, json=body) as answer:
        for _ in answer.iter_raw():
            times.append((time.monotonic() - begin, server.talker.begun - server.talker.left))
    assert len([at for at, running in times if running]) >= 2, "pieces came while there was more to come"
    assert times[0][0] < 0.5 * times[-1][0]


# Errors and aborts


def test_a_failure_before_the_first_sound_is_an_error(server):
    for fields in ({}, {"stream": False}, {"stream_format": "sse"}):
        answer = server.http.post(SPEECH, json={"input": "x", "fail_at": 0, **fields})
        assert answer.status_code == 500, answer.text
        assert "stage talker" in answer.json()["error"]["message"] and "speech-" in answer.json()["error"]["message"]


def test_a_failure_after_it_breaks_the_connection_off(server):
    body = {"input": "x", "fail_at": 30, "frame_seconds": 0.005, "response_format": "pcm"}
    received = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        server.http.stream("POST", SPEECH, json=body) as answer,
    ):
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            received += piece
    assert received, "some of it had been sent"
    assert server.http.post(SPEECH, json={**body, "stream": False}).status_code == 500


def test_a_failure_among_events_is_an_event(server):
    body = {"input": "x", "fail_at": 30, "frame_seconds": 0.005, "stream_format": "sse"}
    *deltas, last = events_of(server.http.post(SPEECH, json=body).text)
    assert deltas and last["type"] == "error" and "stage talker" in last["error"]["message"]
    assert last["error"]["code"] == 500


def test_speech_without_sound_is_an_error(server):
    answer = server.http.post(SPEECH, json={"input": "x", "frames": 0})
    assert answer.status_code == 500 and "no sound" in answer.json()["error"]["message"]


def leave(server, body, before):
    """Send a request and go away once ``before`` is so."""
    body = json.dumps(body).encode()
    head = f"POST {SPEECH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        before(connection)


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream_format": "sse"}], ids=str)
def test_a_client_that_leaves_cancels_the_work(server, fields):
    made, ended = server.talker.made, server.engine.ended["cancelled"]
    body = {"input": "x", "frames": 4000, "frame_seconds": 0.005, "response_format": "pcm", **fields}
    leave(server, body, lambda connection: wait_for(lambda: server.talker.made > made + 40))
    wait_for(lambda: server.engine.running == 0, 1.0, "the end of the work")
    assert server.talker.made < made + 400 and server.engine.ended["cancelled"] == ended + 1


def test_a_client_that_leaves_before_any_sound_cancels_the_work(server):
    ended = server.engine.ended["cancelled"]
    leave(
        server,
        {"input": "x", "frames": 10, "frame_seconds": 1},
        lambda connection: wait_for(lambda: server.engine.running),
    )
    wait_for(lambda: server.engine.running == 0, 0.9, "the end of the work")
    assert server.engine.ended["cancelled"] == ended + 1


def test_a_client_that_takes_nothing_is_dropped(server, monkeypatch):
    monkeypatch.setattr(speech_answers, "SEND_SECONDS", 0.3)
    made = server.talker.made

    def wait(connection):
        wait_for(lambda: server.talker.made > made)
        wait_for(lambda: server.engine.running == 0, 20, "the end of the work")

    leave(server, {"input": "x" * 1000, "frames": 4000, "frame_seconds": 0.0001, "response_format": "pcm",
                   "sample_rate": 48000, "speed": 0.25}, wait)  # fmt: skip


def test_one_request_too_many_is_turned_away(start):
    server = start(max_running=1, max_queued=1)
    body = {"input": "x", "frames": 400, "frame_seconds": 0.01}
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server.http.stream("POST", SPEECH, json=body))
        answer = server.http.post(SPEECH, json=body)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "RateLimitError"
        for path, options in (
            (BATCH, {"json": {"items": [body]}}),
            (VOICES, {"data": {"name": "v", "consent": "yes"}, "files": {"audio_sample": sample()}}),
        ):
            assert server.http.post(path, **options).status_code == 429
    wait_for(lambda: server.engine.active == 0)
    assert server.http.post(SPEECH, json={"input": "x"}).status_code == 200
    assert server.http.post(BATCH, json={"items": [{"input": "x"}] * 3}).status_code == 400


@pytest.mark.parametrize("stage", ["talker", "decoder", "encoder"])
def test_a_stage_that_is_down_is_named(start, stage):
    server = start()
    getattr(server, stage).down = True
    for path, body in ((SPEECH, {"input": "x"}), (BATCH, {"items": [{"input": "x"}]})):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert stage in answer.json()["error"]["message"]


BAD = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": " \n"}, "input"),
    ({"input": 7}, "input"),
    ({"input": None}, "input"),
    ({"input": "x" * 20_001}, "input"),
    ({"input": "\ud800"}, None),
    ({"voice": "zed"}, "voice"),
    ({"voice": 3}, "voice"),
    ({"voice": {"name": "ann"}}, "voice"),
    ({"voice": {"id": 3}}, "voice"),
    ({"voice": {"id": None}}, "voice"),
    ({"voice": "v" * 65}, "voice"),
    ({"response_format": "ogg"}, "response_format"),
    ({"response_format": 3}, "response_format"),
    ({"speed": 0.2}, "speed"),
    ({"speed": 4.5}, "speed"),
    ({"speed": "1"}, "speed"),
    ({"speed": True}, "speed"),
    ({"sample_rate": 7999}, "sample_rate"),
    ({"sample_rate": 48_001}, "sample_rate"),
    ({"sample_rate": "8000"}, "sample_rate"),
    ({"sample_rate": 44_100, "response_format": "opus"}, "sample_rate"),
    ({"sample_rate": 12_345}, "sample_rate"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_format": "chunks"}, "stream_format"),
    ({"stream_format": "sse", "stream": False}, "stream_format"),
    ({"instructions": "x" * 4_001}, "instructions"),
    ({"instructions": 3}, "instructions"),
    ({"language": 3}, "language"),
    ({"language": "x" * 65}, "language"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**62}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": 8_193}, "max_new_tokens"),
    ({"max_new_tokens": "5"}, "max_new_tokens"),
    ({"task_type": "Sing"}, "task_type"),
    ({"x_vector_only_mode": "yes"}, "x_vector_only_mode"),
    ({"ref_text": 3}, "ref_text"),
    ({"ref_audio": 3, "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "no base64!", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "AAAA", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "data:audio/wav,xx", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "data:audio/wav;base64", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "A" * (15 << 20), "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "file:///etc/passwd", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "http://127.0.0.1:9/x", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "https://sound/1"}, "ref_text"),
    ({"ref_audio": "https://sound/0.01", "ref_text": "x"}, "ref_audio"),
    ({"ref_audio": "https://sound/61", "ref_text": "x"}, "ref_audio"),
    ({"reference": [0.0], "ref_text": "x"}, "reference"),
    ({"stored_voice": {"pitch": 3}}, "stored_voice"),
    ({"respons_format": "mp3"}, "respons_format"),
    ({"n" * 200: 1}, "n" * 77 + "..."),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_named(server, fields, param):
    begun = server.talker.begun
    body = fields if "input" in fields or not fields else {"input": "x", **fields}
    answer = server.http.post(SPEECH, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["code"] == 400 and error["type"] == "BadRequestError"
    assert param is None or param in error["message"]
    assert len(error["message"]) < 500
    assert server.talker.begun == begun and server.engine.active == 0, "nothing was begun"


@pytest.mark.parametrize(("fields", "param"), [case for case in BAD if case[1]], ids=lambda value: str(value)[:60])
def test_a_bad_item_of_a_batch_is_named_and_the_others_are_spoken(server, fields, param):
    if {"stream", "stream_format"} & set(fields):
        param = next(name for name in fields if name.startswith("stream"))
    item = fields if "input" in fields or not fields else {"input": "x", **fields}
    content = json.dumps({"items": [{"input": "good"}, item], "response_format": "pcm", "frames": 2})
    if len(item) == 2 and "response_format" in item:
        content = content.replace('"response_format": "pcm", ', "")
    answer = server.http.post(BATCH, content=content, headers={"content-type": "application/json"})
    if answer.status_code == 400:  # the batch as a whole is no better
        assert answer.json()["error"]["param"] == param
        return
    good, bad = answer.json()["results"]
    if fields == {"sample_rate": 12_345}:
        assert bad["status"] == "success", "pcm has any rate"
        return
    assert (good["status"], bad["status"]) == ("success", "error"), bad
    assert bad["error"]["param"] == param and bad["error"]["code"] == 400


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"{", "application/json"), (b"[]", "application/json"), (b"\xff", "application/json"), (b"x", "text/plain"),
     (b"--x", "multipart/form-data"), (b"", "application/json"), (b'{"input": "x", "input": "y"}', "application/json")],
)  # fmt: skip
@pytest.mark.parametrize("path", [SPEECH, BATCH, VOICES])
def test_a_body_that_is_no_object_is_a_bad_request(server, path, content, kind):
    answer = server.http.post(path, content=content, headers={"content-type": kind})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "size"), [(SPEECH, 17), (VOICES, 17), (BATCH, 65)])
def test_a_body_that_is_too_large_is_refused(server, path, size):
    def chunks():
        for _ in range(size):
            yield b" " * (1 << 20)

    answer = server.http.post(path, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_model_of_0_6b_refuses_instructions(start, tmp_path):
    from omni_core.checkpoint import Checkpoint
    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint
    from omni_plugin_qwen3_tts.requests import Qwen3TTSRequest
    from omni_plugin_qwen3_tts.speech import Qwen3TTSSpeech

    write_checkpoint(tmp_path / "small", kind="custom-voice", size_name="tiny-0.6b")
    model = Qwen3TTSSpeech.load(Checkpoint(tmp_path / "small"))
    http = start(model=model, request_model=Qwen3TTSRequest).http
    fields = {"input": "Hello.", "instructions": "Shout."}
    answer = http.post(SPEECH, json=fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "instructions" and "0.6B model takes no instructions" in error["message"]
    (item,) = http.post(BATCH, json={"items": [fields]}).json()["results"]
    assert item["status"] == "error" and item["error"] == error


def test_an_unknown_model_is_not_found_and_each_served_name_is_known(server, speak):
    for path, body in ((SPEECH, {"input": "x"}), (BATCH, {"items": [{"input": "x"}]})):
        answer = server.http.post(path, json={**body, "model": "nope"})
        assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    for name in ("fake", "tts-1"):
        speak(model=name)


def test_text_of_any_script_and_of_the_greatest_length_is_spoken(speak):
    for text in ("🙂🏳️‍🌈 é 漢字", "x" * 20_000, "🙂" * 20_000):
        assert len(speak(text, response_format="pcm", frames=5).content) == 2 * 5 * SAMPLES


def test_null_is_the_same_as_leaving_a_field_out(speak):
    null = dict.fromkeys(("voice", "speed", "sample_rate", "ref_audio", "stream", "language", "model", "task_type"))
    assert speak(**null).content == speak().content


def test_32_clients_at_once_get_what_each_gets_alone(server):
    async def work():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [
                {"input": f"number {i}", "voice": list(PITCHES)[i % 3], "seed": i, "response_format": "wav",
                 "frames": 20 + i, "frame_seconds": 0.001}
                for i in range(32)
            ]  # fmt: skip
            together = await asyncio.gather(*(client.post(SPEECH, json=body) for body in bodies))
            alone = [await client.post(SPEECH, json=body) for body in bodies]
            return together, alone

    together, alone = asyncio.run(work())
    assert {answer.status_code for answer in together} == {200}
    assert [answer.content for answer in together] == [answer.content for answer in alone]
    assert len({answer.content for answer in alone}) == 32


# Reference sound


def test_reference_sound_means_the_same_however_it_comes(server):
    wav, seen = sample(), len(server.encoder.seen)
    text = base64.b64encode(wav).decode()
    fields = {"input": "x", "ref_text": "y", "seed": 1, "response_format": "pcm"}
    answers = [
        server.http.post(SPEECH, json={**fields, "ref_audio": f"data:audio/wav;base64,{text}"}),
        server.http.post(SPEECH, json={**fields, "ref_audio": text}),
        server.http.post(SPEECH, json={**fields, "ref_audio": "https://sound/1"}),
        server.http.post(SPEECH, data={**fields, "seed": "1"}, files={"ref_audio": ("a.wav", wav, "audio/wav")}),
        server.http.post(SPEECH, data={**fields, "seed": "1", "ref_audio": "https://sound/1"}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5, [answer.text[:200] for answer in answers]
    assert len({answer.content for answer in answers}) == 1
    assert pitch_of(decoded(answers[0].content, "pcm")[0]) == pytest.approx(CLONED, abs=3)
    assert server.encoder.seen[seen:] == [(RATE, {"codes": True})] * 5


def test_fields_of_the_family_reach_it_from_json_and_forms(server):
    fields = {"input": "x", "ref_audio": "https://sound/2", "response_format": "pcm"}
    assert server.http.post(SPEECH, json={**fields, "x_vector_only_mode": True}).status_code == 200
    assert server.http.post(SPEECH, data={**fields, "x_vector_only_mode": "true", "speed": "2"}).status_code == 200
    assert server.encoder.seen[-2:] == [(2 * RATE, {"codes": False})] * 2


# Batches


def test_a_batch_answers_each_item_with_its_own_fields(server):
    items = [
        {"input": "a b"},
        {"input": "c", "voice": "carol", "response_format": "flac"},
        {"input": "d", "fail_at": 3},
    ]
    answer = server.http.post(BATCH, json={"items": items, "voice": "bob", "response_format": "wav", "frames": 50})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["total"], body["succeeded"], body["failed"]) == (3, 2, 1)
    first, second, third = body["results"]
    for result, name, pitch in ((first, "wav", "bob"), (second, "flac", "carol")):
        samples, rate = decoded(base64.b64decode(result["audio_data"]), name)
        assert len(samples) == 50 * SAMPLES and pitch_of(samples, rate) == pytest.approx(PITCHES[pitch], abs=3)
        assert result["media_type"] == FORMATS[name].media_type and result["finish_reason"] == "stop"
    assert first["usage"] == {"input_tokens": 2, "output_tokens": 50, "total_tokens": 52}
    assert third["status"] == "error" and third["error"]["code"] == 500 and third["index"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "items"), ({"items": []}, "items"), ({"items": "x"}, "items"), ({"items": ["x"]}, "items"),
     ({"items": [{"input": "x"}] * 33}, "items"), ({"items": [{"input": "x"}], "input": "y"}, "input"),
     ({"items": [{"input": "x"}], "stream": True}, "stream"), ({"items": [{"input": "x"}], "nope": 1}, "nope"),
     ({"items": [{"input": "x"}], "speed": 9}, "speed"), ({"items": [{"input": "x"}], "voice": 3}, "voice"),
     ({"items": [{"input": "x"}], "task_type": "Sing"}, "task_type"),
     ({"items": [{"input": "x"}], "ref_audio": 3}, "ref_audio")],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_batch_is_refused_as_a_whole(server, body, param):
    answer = server.http.post(BATCH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_the_largest_batch_is_spoken_at_once(server):
    begin = time.monotonic()
    body = {"items": [{"input": "x"}] * 32, "frames": 5, "frame_seconds": 0.05, "response_format": "pcm"}
    answer = server.http.post(BATCH, json=body)
    assert answer.json()["succeeded"] == 32 and time.monotonic() - begin < 32 * 5 * 0.05 / 2


# Voices


def upload(http, name="dora", *, audio=None, **fields):
    data = {"name": name, "consent": "I agree", **fields}
    return http.post(VOICES, data=data, files={"audio_sample": ("a.wav", audio or sample(), "audio/wav")})


def test_the_life_of_a_voice(start, tmp_path):
    server = start(tmp_path)
    assert server.http.get(VOICES).json() == {"voices": ["ann", "bob", "carol"], "uploaded_voices": []}
    made = upload(server.http, ref_text="hello", speaker_description="a woman").json()
    assert made == {
        "id": "dora", "name": "dora", "created_at": made["created_at"], "ref_text": "hello",
        "speaker_description": "a woman", "object": "audio.voice", "type": "audio_sample",
    }  # fmt: skip
    assert "ref_text" not in upload(server.http, "eve").json()
    assert server.encoder.seen == [(RATE, {"codes": True}), (RATE, {"codes": False})]
    assert [voice["name"] for voice in server.http.get(VOICES).json()["uploaded_voices"]] == ["dora", "eve"]
    for voice in ("dora", "DORA", {"id": "dora"}):
        answer = server.http.post(SPEECH, json={"input": "x", "voice": voice, "response_format": "pcm"})
        assert pitch_of(decoded(answer.content, "pcm")[0]) == pytest.approx(CLONED, abs=13)
    assert len(server.encoder.seen) == 2, "a stored voice is not encoded again"
    answer = server.http.delete(f"{VOICES}/dora")
    assert answer.json() == {"id": "dora", "name": "dora", "object": "audio.voice.deleted", "deleted": True}
    assert server.http.delete(f"{VOICES}/dora").status_code == 404
    assert server.http.post(SPEECH, json={"input": "x", "voice": "dora"}).status_code == 400
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["eve.safetensors"]


def test_voices_outlive_the_server_and_damaged_ones_are_left_out(start, tmp_path, caplog):
    with SpeechServer(tmp_path).running() as first:
        http = httpx.Client(base_url=first.url)
        for name in ("dora", "eve", "fay"):
            assert upload(http, name, ref_text="hello").status_code == 200
        with pytest.raises(ConfigError, match="in use by another server"):
            VoiceStore(tmp_path, limit=1)
    (tmp_path / "eve.safetensors").write_bytes((tmp_path / "eve.safetensors").read_bytes()[:-5])
    (tmp_path / "fay.safetensors").rename(tmp_path / "gil.safetensors")
    (tmp_path / "hal.safetensors").write_bytes(b"")
    second = start(tmp_path)
    assert second.store.skipped == ["eve.safetensors", "gil.safetensors", "hal.safetensors"]
    assert all(name in caplog.text for name in second.store.skipped)
    assert [voice["name"] for voice in second.http.get(VOICES).json()["uploaded_voices"]] == ["dora"]
    answer = second.http.post(SPEECH, json={"input": "x", "voice": "dora", "response_format": "pcm"})
    assert pitch_of(decoded(answer.content, "pcm")[0]) == pytest.approx(CLONED, abs=13)
    assert upload(second.http, "eve").status_code == 409, "a file that cannot be read is not replaced"
    stored, encoded = second.store.get("dora")
    assert stored.ref_text == "hello" and encoded["kind"] == "cloned"
    assert encoded["pitch"].shape == () and encoded["codes"].dtype == np.int32 and encoded["codes"].shape == (3, 2)


def test_a_voice_of_another_checkpoint_is_left_out(tmp_path):
    store = VoiceStore(tmp_path, limit=3, checkpoint="one")
    store.add("dora", {"pitch": np.array(3)}, consent="yes")
    store.close()
    other = VoiceStore(tmp_path, limit=3, checkpoint="two")
    assert other.list() == [] and other.skipped == ["dora.safetensors"]
    other.close()


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"name": ""}, "name", 400),
        ({"name": "../evil"}, "name", 400),
        ({"name": "a/b"}, "name", 400),
        ({"name": "a\n"}, "name", 400),
        ({"name": "x" * 65}, "name", 400),
        ({"name": "."}, "name", 400),
        ({"name": "ann"}, "name", 400),
        ({"name": "ANN"}, "name", 400),
        ({"name": "Default"}, "name", 400),
        ({"consent": ""}, "consent", 400),
        ({"consent": " "}, "consent", 400),
        ({"ref_text": ""}, "ref_text", 400),
        ({"ref_text": "x" * 4_001}, "ref_text", 400),
        ({"speaker_description": "x" * 1_001}, "speaker_description", 400),
        ({"type": "prompt"}, "type", 400),
        ({"nope": "x"}, "nope", 400),
    ],
    ids=str,
)
def test_a_bad_field_of_a_voice_is_named(server, fields, param, status):
    answer = upload(server.http, **fields)
    assert answer.status_code == status and answer.json()["error"]["param"] == param
    assert server.http.get(VOICES).json()["uploaded_voices"] == [] and list(server.store.folder.glob("*.*t*s")) == []


def test_a_text_that_is_too_long_is_counted_in_characters(server):
    for answer in (
        upload(server.http, ref_text="x" * 4_001),
        server.http.post(SPEECH, json={"input": "x", "ref_text": "x" * 4_001}),
    ):
        message = answer.json()["error"]["message"]
        assert ": must have at most 4000 characters" in message or ": string should have at most 4000" in message


def test_a_reserved_name_is_told_apart(server):
    assert "'default' is reserved" in upload(server.http, name="default").json()["error"]["message"]


def test_a_voice_that_a_killed_server_was_writing_is_gone(tmp_path):
    for name in ("me.partial", "the operator's.partial"):
        (tmp_path / name).write_bytes(b"half")
    VoiceStore(tmp_path, limit=2).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner.lock", "the operator's.partial"]


def test_a_bad_sample_is_refused(server):
    for audio in (b"x", sample(61), sample(0.01), sample() + bytes(11 << 20)):
        answer = upload(server.http, audio=audio)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "audio_sample"
    for options in (
        {"data": {"name": "x", "consent": "y"}},
        {"data": {"name": "x", "consent": "y", "audio_sample": "z"}},
    ):
        answer = server.http.post(VOICES, **options)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "audio_sample"
    for missing in ("name", "consent"):
        data = {name: "x" for name in ("name", "consent") if name != missing}
        answer = server.http.post(VOICES, data=data, files={"audio_sample": ("a.wav", sample(), "audio/wav")})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == missing


def test_voices_are_bounded_named_once_and_those_of_the_model_stay(start):
    server = start(limit=2)
    assert upload(server.http, "dora").status_code == upload(server.http, "eve").status_code == 200
    answer = upload(server.http, "fay")
    assert answer.status_code == 400 and "2 uploaded voices" in answer.json()["error"]["message"]
    assert upload(server.http, "DORA").status_code == 409
    for name in ("ann", "ANN"):
        assert server.http.delete(f"{VOICES}/{name}").status_code == 400
    for name in ("nope", "..", "..%2F..%2Fetc", "%00"):
        assert server.http.delete(f"{VOICES}/{name}").status_code in (404, 405)
    for fields in ({"ref_text": "x"}, {"ref_audio": "AAAA"}):
        answer = server.http.post(SPEECH, json={"input": "x", "voice": "dora", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] in fields


# The WebSocket


@pytest.fixture
def talk(server):
    """Connect to the WebSocket: ``send(type, **fields)`` and ``recv()``, a dict or bytes."""
    with connect(f"ws://127.0.0.1:{server.port}/v1/audio/speech/stream", max_size=None) as socket:

        class Talk:
            def send(self, kind, **fields):
                socket.send(json.dumps({"type": kind, **fields}))

            def recv(self, timeout=10):
                message = socket.recv(timeout)
                return message if isinstance(message, bytes) else json.loads(message)

            def until(self, kind):
                """Messages up to one of this type."""
                messages = [self.recv()]
                while not (isinstance(messages[-1], dict) and messages[-1]["type"] == kind):
                    messages.append(self.recv())
                return messages

        Talk.raw = socket
        yield Talk()


CONFIG = {"response_format": "pcm", "seed": 3, "frames": 30}


def test_a_session_speaks_what_each_flush_brings(talk, speak):
    talk.send("session.config", **CONFIG, voice="bob")
    for index, words in enumerate((["good ", "morning"], ["again"])):
        for word in words:
            talk.send("input.text", text=word)
        talk.send("input.done")
        start, sound, done, end = talk.until("session.done")
        names = {"utterance_index": index, "sentence_index": 0}
        assert start == {
            "type": "audio.start", **names, "sentence_text": "".join(words), "format": "pcm", "sample_rate": RATE,
        }  # fmt: skip
        usage = {"input_tokens": len(words), "output_tokens": 30, "total_tokens": len(words) + 30}
        assert done == {
            "type": "audio.done", **names, "total_bytes": len(sound), "error": False, "usage": usage,
            "finish_reason": "stop",
        }  # fmt: skip
        assert sound == speak("".join(words), voice="bob", **CONFIG).content
        assert end == {"type": "session.done", "utterance_index": index, "total_sentences": 1}
    talk.send("input.done")
    assert talk.recv() == {"type": "session.done", "utterance_index": 2, "total_sentences": 0}
    talk.send("session.config", **CONFIG, voice="carol", stream_audio=True)
    talk.send("input.text", text="more")
    talk.send("input.done")
    start, *pieces, done, end = talk.until("session.done")
    assert len(pieces) >= 2 and b"".join(pieces) == speak("more", voice="carol", **CONFIG).content
    talk.send("session.close")
    with pytest.raises(websockets.exceptions.ConnectionClosedOK):
        talk.recv()


def test_text_is_taken_while_an_utterance_is_spoken_and_what_waits_at_the_close_is_spoken(talk):
    talk.send("session.config", **{**CONFIG, "frame_seconds": 0.01})
    for text in ("one", "two", "three"):
        talk.send("input.text", text=text)
        talk.send("input.done")
    talk.send("session.close")
    spoken = [talk.until("session.done")[0]["sentence_text"] for _ in range(3)]
    assert spoken == ["one", "two", "three"]
    with pytest.raises(websockets.exceptions.ConnectionClosedOK):
        talk.recv()


def test_a_seed_is_drawn_for_each_utterance_unless_it_is_given(talk):
    sounds = []
    for seed in ({}, {"seed": 3}):
        talk.send("session.config", response_format="pcm", frames=5, **seed)
        for _ in range(2):
            talk.send("input.text", text="x")
            talk.send("input.done")
            sounds.append(talk.until("session.done")[1])
    assert sounds[0] != sounds[1] and sounds[2] == sounds[3]


BAD_MESSAGES = [
    ("x", None), ("[]", None), ("{}", "type"), (json.dumps({"type": "nope"}), "type"), (b"\x00", "type"),
    (json.dumps({"type": ["x"]}), "type"),
    (json.dumps({"type": "session.config", "voice": "zed"}), "voice"),
    (json.dumps({"type": "session.config", "speed": 9}), "speed"),
    (json.dumps({"type": "session.config", "stream": True}), "stream"),
    (json.dumps({"type": "session.config", "stream_audio": "yes"}), "stream_audio"),
    (json.dumps({"type": "session.config", "input": "x"}), "input"),
    (json.dumps({"type": "session.config", "model": "nope"}), "model"),
    (json.dumps({"type": "session.config", "nope": 1}), "nope"),
    (json.dumps({"type": "input.text"}), "text"),
    (json.dumps({"type": "input.text", "text": 3}), "text"),
    (json.dumps({"type": "input.text", "text": "x", "more": 1}), "more"),
    (json.dumps({"type": "input.text", "text": "x" * 20_001}), "text"),
    (json.dumps({"type": "input.text", "text": "\ud800"}), None),
    (json.dumps({"type": "input.done", "more": 1}), "more"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "param"), BAD_MESSAGES, ids=lambda value: str(value)[:50])
def test_a_bad_message_is_answered_and_the_session_goes_on(talk, message, param):
    talk.send("session.config", **CONFIG)
    talk.raw.send(message)
    answer = talk.recv()
    assert answer["type"] == "error" and answer["error"]["param"] == param and answer["error"]["message"]
    talk.send("input.text", text="x")
    talk.send("input.done")
    assert talk.until("session.done")[0]["sentence_text"] == "x"


def test_what_is_sent_after_the_close_does_not_hold_the_session_open(server):
    """It may come just while the session is being ended; that stayed open until the client had long been silent."""
    for _ in range(10):
        with connect(f"ws://127.0.0.1:{server.port}/v1/audio/speech/stream") as socket:
            for kind in ("session.close", "input.done"):
                socket.send(json.dumps({"type": kind}))
            with pytest.raises(websockets.exceptions.ConnectionClosedOK):
                socket.recv(1)


def test_a_session_begins_with_its_config_and_keeps_it_while_text_waits(talk):
    for kind, fields in (("input.text", {"text": "x"}), ("input.done", {})):
        talk.send(kind, **fields)
        assert "session.config first" in talk.recv()["error"]["message"]
    talk.send("session.config", **CONFIG)
    talk.send("input.text", text="x")
    talk.send("session.config", **CONFIG, voice="bob")
    assert "input.done" in talk.recv()["error"]["message"]
    talk.send("input.text", text="y" * 20_000)
    assert talk.recv()["error"]["param"] == "text"


def test_too_many_utterances_do_not_wait(talk):
    talk.send("session.config", **{**CONFIG, "frame_seconds": 0.02})
    for _ in range(20):
        talk.send("input.text", text="x")
        talk.send("input.done")
    wait_for(lambda: (message := talk.recv()) and isinstance(message, dict) and message["type"] == "error")


def test_an_utterance_that_fails_says_so_and_the_next_is_spoken(talk):
    talk.send("session.config", **{**CONFIG, "fail_at": 20, "stream_audio": True})
    talk.send("input.text", text="x")
    talk.send("input.done")
    start, *pieces, error, done, _ = talk.until("session.done")
    assert start["type"] == "audio.start" and "stage talker" in error["error"]["message"]
    assert error["utterance_index"] == 0 and done["error"] is True
    assert done["total_bytes"] == sum(map(len, pieces))
    talk.send("session.config", **CONFIG)
    talk.send("input.text", text="x")
    talk.send("input.done")
    assert talk.until("session.done")[-2]["error"] is False


@pytest.mark.parametrize("stream_audio", [True, False])
def test_a_socket_that_drops_cancels_the_work(server, talk, stream_audio):
    made, ended = server.talker.made, server.engine.ended["cancelled"]
    talk.send("session.config", response_format="pcm", frames=4000, frame_seconds=0.005, stream_audio=stream_audio)
    talk.send("input.text", text="x")
    talk.send("input.done")
    wait_for(lambda: server.talker.made > made + 40)
    talk.raw.socket.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: server.engine.running == 0, 1.0, "the end of the work")
    assert server.engine.ended["cancelled"] == ended + 1


def test_a_session_in_which_nothing_happens_is_closed_but_not_while_it_speaks(talk):
    talk.send("session.config", **{**CONFIG, "frames": 60, "frame_seconds": 0.055})
    talk.send("input.text", text="x")
    talk.send("input.done")
    begin = time.monotonic()
    assert talk.until("session.done")[-2]["error"] is False and time.monotonic() - begin > 3
    assert "nothing was sent" in talk.recv()["error"]["message"]
    with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
        talk.recv()
    assert closed.value.rcvd.code == 1008


def test_a_message_that_is_too_large_closes_the_session(talk):
    talk.raw.send("x" * (17 << 20))
    with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
        talk.recv()
    assert closed.value.rcvd.code == 1009


# OpenAI's client, and the description


def test_openais_python_client_works(server, tmp_path):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    file = tmp_path / "speech.mp3"
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="bob", input="hello there", extra_body={"frames": 50}
    ) as answer:
        answer.stream_to_file(file)
    samples, rate = decoded(file.read_bytes(), "mp3")
    assert len(samples) / rate == pytest.approx(1.0, abs=0.1) and pitch_of(samples, rate) == pytest.approx(300, abs=3)
    whole = client.audio.speech.create(
        model="tts-1", voice="bob", input="hello there", response_format="wav", speed=2, instructions="calmly"
    )
    assert len(decoded(whole.read(), "wav")[0]) == pytest.approx(40 * SAMPLES / 2, abs=0.1 * RATE)
    with pytest.raises(openai.BadRequestError, match="ann, bob, carol"):
        client.audio.speech.create(model="tts-1", voice="alloy", input="x")
    voice = client.audio.voices.create(audio_sample=("a.wav", sample(), "audio/wav"), consent="cons_1", name="zoe")
    try:
        assert (voice.id, voice.name, voice.object, voice.type) == ("zoe", "zoe", "audio.voice", "audio_sample")
        made = client.audio.speech.create(model="tts-1", voice={"id": "zoe"}, input="x", response_format="pcm")
        assert pitch_of(decoded(made.read(), "pcm")[0]) == pytest.approx(CLONED, abs=13)
    finally:
        server.http.delete(f"{VOICES}/zoe")


def test_every_field_is_declared(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    content = paths[SPEECH]["post"]["requestBody"]["content"]
    for kind in ("application/json", "multipart/form-data"):
        schema = content[kind]["schema"]
        assert {"input", "model", "voice", "ref_audio", "stream_format", "task_type"} <= schema["properties"].keys()
        assert schema["required"] == ["input"]
        assert not {"reference", "stored_voice"} & schema["properties"].keys()
    assert {"200", "400", "404", "413", "429", "500", "503"} <= paths[SPEECH]["post"]["responses"].keys()
    batch = paths[BATCH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert batch["properties"]["items"]["maxItems"] == 32 and "stream" not in batch["properties"]
    assert "audio_sample" in str(paths[VOICES]["post"]["requestBody"])


def test_a_voice_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    store = VoiceStore(tmp_path, limit=3)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("omni_core.http.voices.os.replace", full)
    with pytest.raises(GenerationError, match="No space left"):
        store.add("dora", {"pitch": np.array(3)}, consent="yes")
    assert store.list() == [] and list(tmp_path.glob("dora*")) == []
    store.close()
