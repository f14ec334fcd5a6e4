"""Qwen3-TTS over HTTP, as ``omni serve`` serves it: real stages in processes of their own, of tiny random checkpoints.

Two servers are shared by all tests; the last tests end them, each in its way.
"""

import base64
import json
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest
from safetensors.numpy import load_file
from websockets.sync.client import connect

from omni_core.audio import encode_sound

pytestmark = pytest.mark.serve

ROOT, BIN = Path(__file__).parent.parent, Path(sys.executable).parent
GOLDEN = ROOT / "plugins" / "models" / "qwen3-tts" / "tests" / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
RATE, SAMPLES = 24_000, 1920
STEP = 1 / 32767
GREEDY = {"temperature": 0, "subtalker_temperature": 0}
SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8")
LONG = {**GREEDY, "repetition_penalty": 0.1, "max_new_tokens": 400, "response_format": "pcm", "input": "On and on."}
"""What repeats itself does not find its end before."""


@pytest.fixture(scope="module")
def serve(start_server, tmp_path_factory):
    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint

    def serve(kind, size="tiny"):
        folder = write_checkpoint(tmp_path_factory.mktemp(kind), kind=kind, size_name=size)
        return start_server(str(BIN / "omni"), "serve", str(folder), "--served-model-name", kind, *FLAGS)

    return serve


@pytest.fixture(scope="module")
def custom_voice(serve):
    return serve("custom-voice")


@pytest.fixture(scope="module")
def base(serve):
    return serve("base")


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Whatever a test does, the servers are idle and healthy after it."""
    yield
    for name in {"custom_voice", "base"} & set(request.fixturenames):
        server = request.getfixturevalue(name)
        if server.process.poll() is None:
            wait_for(lambda server=server: active(server) == 0, what="the end of all work")
            assert server.http.get("/health").status_code == 200


def wait_for(predicate, seconds=20.0, what="it"):
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.02)
    return value


def metric(server, name, **labels):
    wanted = [f'{key}="{label}"' for key, label in {"stage": "talker", **labels}.items()]
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))


def active(server):
    return metric(server, "omni_requests_running") + metric(server, "omni_requests_waiting")


def speak(server, text="Hello, hello!", status=200, **fields):
    answer = server.http.post(SPEECH, json={"input": text, "response_format": "pcm", **fields})
    assert answer.status_code == status, answer.text[:2000]
    return answer


def refused(server, text="Hello, hello!", **fields):
    return speak(server, text, 400, **fields).json()["error"]


def sound(data):
    return np.frombuffer(data, "<i2").astype(np.float32) * STEP


def assert_same(data, other):
    """Sound differs by rounding alone."""
    one, two = sound(data), sound(other)
    assert one.shape == two.shape
    assert np.abs(one - two).max() < 1.5 * STEP


def case(name, **fields):
    """The request of a golden case."""
    values = CASES[name]
    asked = {
        "text": values["text"],
        "voice": values.get("speaker"),
        "language": values["language"],
        "instructions": values.get("instruct"),
        "ref_text": values.get("ref_text"),
        "non_streaming_mode": values["non_streaming_mode"],
        "max_new_tokens": 24,
        **GREEDY,
        **fields,
    }
    if values.get("x_vector_only_mode"):
        asked["x_vector_only_mode"] = True
    return asked


def golden_audio(name):
    return load_file(GOLDEN / f"{name}.safetensors")["audio"]


def assert_golden(data, name):
    expected = np.clip(golden_audio(name), -1, 1)
    made = sound(data)
    assert made.shape == expected.shape
    assert np.abs(made - expected).max() < 1e-4 + STEP


@pytest.fixture(scope="module")
def reference():
    """The golden reference sound, as a wav."""
    samples = load_file(GOLDEN / "speech_tokenizer.safetensors")["encoder.audio"]
    return encode_sound(samples.astype(np.float32) / 32768, "wav", RATE)


def data_url(wav):
    return "data:audio/wav;base64," + base64.b64encode(wav).decode()


# What is said


@pytest.mark.parametrize("stream", [True, False])
def test_speech_over_http_is_the_golden_one(custom_voice, stream):
    answer = speak(custom_voice, **case("custom_voice", stream=stream))
    assert_golden(answer.content, "custom_voice")
    assert answer.headers["x-sample-rate"] == str(RATE)
    if not stream:
        assert answer.headers["x-finish-reason"] == "length" and answer.headers["x-output-tokens"] == "24"


def test_another_speaker_or_language_is_not_the_golden_one(custom_voice):
    for other in ({"voice": "Ryan"}, {"language": "German"}, {"instructions": "Shout."}):
        made = sound(speak(custom_voice, **case("custom_voice", **other)).content)
        expected = golden_audio("custom_voice")
        assert made.shape != expected.shape or np.abs(made - expected).max() > 0.01, other


def test_speech_in_the_voice_of_a_reference_is_the_golden_one(base, reference):
    answer = speak(base, **case("base_in_context", ref_audio=data_url(reference)))
    assert_golden(answer.content, "base_in_context")
    assert base.http.get("/health").json()["stages"].keys() == {"talker", "decoder", "encoder"}


def test_an_uploaded_voice_speaks_as_its_sample_in_a_request_does(base, reference):
    values = case("base_in_context")
    form = {"name": "golden", "consent": "of a random number generator", "ref_text": values.pop("ref_text")}
    uploaded = base.http.post(VOICES, data=form, files={"audio_sample": reference})
    assert uploaded.status_code == 200, uploaded.text
    assert_golden(speak(base, **{**values, "voice": "Golden"}).content, "base_in_context")
    by_embedding = {**case("base_x_vector"), "voice": "golden"}
    assert_same(
        speak(base, **by_embedding).content, speak(base, **case("base_x_vector", ref_audio=data_url(reference))).content
    )
    assert base.http.delete(f"{VOICES}/golden").status_code == 200
    assert "unknown" in refused(base, **by_embedding)["message"]


def test_the_embedding_alone_is_another_voice_than_the_embedding_and_the_sound(base, reference):
    """There is no golden sound of it: its codes are compared where the talker is tested."""
    url = data_url(reference)
    alone = sound(speak(base, **case("base_x_vector", ref_audio=url)).content)
    assert len(alone) == CASES["base_x_vector"]["samples"]
    together = sound(speak(base, **case("base_in_context", ref_audio=url)).content)
    assert np.abs(alone - together).max() > 0.01


# Sleep


def test_module_stages_sleep_and_give_the_same_sound_afterwards(base, reference):
    """Given a decoder and an encoder asleep, requests are refused; awake, the sound is the same."""
    asked = case("base_in_context", ref_audio=data_url(reference))
    before = speak(base, **asked).content
    for stages in (["decoder"], ["encoder"], ["decoder", "encoder"]):
        slept = base.http.post("/v1/omni/sleep", json={"stages": stages})
        assert slept.status_code == 200, slept.text
        health = base.http.get("/health")
        assert health.status_code == 200
        assert [name for name, stage in health.json()["stages"].items() if stage["state"] == "asleep"] == stages
        refused = speak(base, status=503, **asked)
        assert int(refused.headers["retry-after"]) >= 1
        assert "asleep; wake it up with POST /v1/omni/wakeup" in refused.json()["error"]["message"]
        woken = base.http.post("/v1/omni/wakeup")
        assert {stage["state"] for stage in woken.json()["stages"].values()} == {"running"}
        assert_same(speak(base, **asked).content, before)


@pytest.mark.parametrize(("mode", "ends"), [("abort", False), ("wait", True)])
def test_what_becomes_of_speech_under_way_when_the_decoder_falls_asleep(custom_voice, mode, ends):
    whole, data = custom_voice.http.post(SPEECH, json=LONG).content, b""
    with custom_voice.http.stream("POST", SPEECH, json=LONG) as answer, ThreadPoolExecutor(1) as pool:
        pieces = answer.iter_raw()
        data += next(pieces)
        body = {"stages": ["decoder"], "mode": mode}
        sleeping = pool.submit(httpx.post, f"{custom_voice.url}/v1/omni/sleep", json=body, timeout=60)
        try:
            for piece in pieces:
                data += piece
        except httpx.RemoteProtocolError:
            assert not ends
        assert sleeping.result().status_code == 200
    assert (len(data) == len(whole)) is ends
    speak(custom_voice, status=503)
    assert custom_voice.http.post("/v1/omni/wakeup").status_code == 200
    speak(custom_voice, **GREEDY, max_new_tokens=4)


def test_a_talker_without_sleep_mode_is_refused_before_the_others_sleep(custom_voice):
    answer = custom_voice.http.post("/v1/omni/sleep")
    assert answer.status_code == 400
    assert "stage 'talker' cannot sleep: start it with --enable-sleep-mode" in answer.json()["error"]["message"]
    stages = custom_voice.http.get("/health").json()["stages"]
    assert {stage["state"] for stage in stages.values()} == {"running"}


# While it is made


def timed(server, **fields):
    """Pieces of an answer, and when each came, in seconds from the beginning and as a part of the whole."""
    begin, pieces, times = time.monotonic(), [], []
    with server.http.stream("POST", SPEECH, json=fields) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            pieces.append(piece)
            times.append(time.monotonic() - begin)
    return pieces, times


def test_sound_comes_while_it_is_made(custom_voice):
    speak(custom_voice, max_new_tokens=40)
    fields = {**LONG, "max_new_tokens": 100}
    pieces, times = timed(custom_voice, **fields)
    whole = b"".join(pieces)
    assert len(whole) == 2 * SAMPLES * 100
    assert len(pieces) > 5
    assert times[0] < times[-1] / 3 and times[1] < times[-1] / 2
    assert_same(whole, speak(custom_voice, **fields, stream=False).content)


def test_a_streamed_wav_has_one_header(custom_voice):
    fields = {**LONG, "max_new_tokens": 60}
    whole = b"".join(timed(custom_voice, **fields)[0])
    wav = b"".join(timed(custom_voice, **{**fields, "response_format": "wav"})[0])
    assert wav[:4] == b"RIFF" and wav.count(b"RIFF") == wav.count(b"WAVEfmt ") == 1
    assert_same(wav[44:], whole)


def test_openais_client_streams_to_a_file(custom_voice, tmp_path):
    client = openai.OpenAI(base_url=f"{custom_voice.url}/v1", api_key="none")
    file = tmp_path / "speech.wav"
    drawn = {"seed": 1, "max_new_tokens": 20}
    with client.audio.speech.with_streaming_response.create(
        model="custom-voice", voice="ryan", input="Good morning!", response_format="wav", extra_body=drawn
    ) as answer:
        answer.stream_to_file(file)
    assert_same(file.read_bytes()[44:], speak(custom_voice, "Good morning!", voice="ryan", **drawn).content)


# Many at once


def sampled(index, **fields):
    voices = ("vivian", "ryan", "eric")
    text = f"This is number {index}."
    return {"text": text, "voice": voices[index % 3], "seed": index, "max_new_tokens": 20 + 3 * index, **fields}


def test_a_seed_gives_the_same_speech_alone_and_among_others(custom_voice):
    alone = [speak(custom_voice, **sampled(index)).content for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda index: speak(custom_voice, **sampled(index)).content, range(8)))
    for one, two in zip(alone, together, strict=True):
        assert_same(one, two)
    assert len({len(one) for one in alone}) > 1 and len(set(alone)) == 8


def test_more_streams_than_run_at_once_wait_and_are_right(custom_voice):
    with ThreadPoolExecutor(32) as threads:
        made = list(threads.map(lambda i: speak(custom_voice, **sampled(i % 4)).content, range(32)))
    alone = [speak(custom_voice, **sampled(index)).content for index in range(4)]
    for index, data in enumerate(made):
        assert_same(data, alone[index % 4])


# Clients that leave


def streaming(server, **fields):
    """A long answer under way, on a connection of its own."""
    return httpx.stream("POST", f"{server.url}{SPEECH}", json={**LONG, **fields}, timeout=60)


def test_a_client_that_leaves_ends_the_work(custom_voice):
    cancelled = metric(custom_voice, "omni_requests_total", outcome="cancelled")
    with streaming(custom_voice) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        assert active(custom_voice) == 1
    wait_for(lambda: active(custom_voice) == 0, 5, "the end of the work")
    assert metric(custom_voice, "omni_requests_total", outcome="cancelled") == cancelled + 1
    assert_golden(speak(custom_voice, **case("custom_voice")).content, "custom_voice")


def test_a_socket_that_is_dropped_ends_the_work(custom_voice):
    cancelled = metric(custom_voice, "omni_requests_total", outcome="cancelled")
    config = {name: value for name, value in LONG.items() if name != "input"}
    talking = connect(custom_voice.url.replace("http", "ws") + f"{SPEECH}/stream", max_size=None)
    talking.send(json.dumps({"type": "session.config", "stream_audio": True, **config}))
    talking.send(json.dumps({"type": "input.text", "text": LONG["input"]}))
    talking.send(json.dumps({"type": "input.done"}))
    assert json.loads(talking.recv())["type"] == "audio.start"
    assert isinstance(talking.recv(), bytes)
    assert active(custom_voice) == 1
    talking.socket.shutdown(socket.SHUT_RDWR)  # without a word
    wait_for(lambda: active(custom_voice) == 0, 5, "the end of the work")
    assert metric(custom_voice, "omni_requests_total", outcome="cancelled") == cancelled + 1
    assert_golden(speak(custom_voice, **case("custom_voice")).content, "custom_voice")


def test_a_socket_says_what_a_request_says(custom_voice):
    values = case("custom_voice")
    text = values.pop("text")
    config = {name: value for name, value in values.items() if value is not None}
    with connect(custom_voice.url.replace("http", "ws") + f"{SPEECH}/stream", max_size=None) as talking:
        talking.send(json.dumps({"type": "session.config", "stream_audio": True, "response_format": "pcm", **config}))
        for word in (text[:9], text[9:]):
            talking.send(json.dumps({"type": "input.text", "text": word}))
        talking.send(json.dumps({"type": "input.done"}))
        talking.send(json.dumps({"type": "session.close"}))
        frames = list(talking)
    sounds = [frame for frame in frames if isinstance(frame, bytes)]
    assert len(sounds) > 1
    assert_golden(b"".join(sounds), "custom_voice")
    assert [json.loads(f)["type"] for f in frames if isinstance(f, str)] == [
        "audio.start",
        "audio.done",
        "session.done",
    ]


# What is refused


def test_text_that_cannot_be_said_is_refused(custom_voice):
    assert refused(custom_voice, "")["param"] == refused(custom_voice, "x" * 20_001)["param"] == "input"
    assert refused(custom_voice, " \n")["param"] == "input"
    long = refused(custom_voice, "a b " * 500)
    assert "too long" in long["message"] and long["param"] == "input", long


def test_emoji_and_other_alphabets_are_said(custom_voice):
    for text in ("😀👩‍👩‍👧 ok", "你好世界", "e\u0301\u200d\u0000x", "👍"):
        made = speak(custom_voice, text, seed=1, max_new_tokens=5).content
        assert 0 < len(made) <= 5 * SAMPLES * 2 and len(made) % (SAMPLES * 2) == 0


def test_names_that_there_are_not_are_refused_with_those_that_there_are(custom_voice):
    known = custom_voice.http.get(VOICES).json()["voices"]
    assert len(known) > 1
    voice = refused(custom_voice, voice="nobody")
    assert voice["param"] == "voice" and "nobody" in voice["message"]
    assert all(name.lower() in voice["message"].lower() for name in known)
    language = refused(custom_voice, language="Klingon")
    assert language["param"] == "language" and "Klingon" in language["message"]
    assert "german" in language["message"].lower() and "english" in language["message"].lower()


def test_the_task_of_another_checkpoint_is_refused(custom_voice, base, reference):
    for task in ("Base", "VoiceDesign"):
        error = refused(custom_voice, task_type=task)
        assert error["param"] == "task_type" and task in error["message"] and "CustomVoice" in error["message"]
    error = refused(base, voice="vivian", task_type="CustomVoice")
    assert error["param"] == "task_type" and "Base" in error["message"] and "CustomVoice" in error["message"]
    assert refused(custom_voice, ref_audio=data_url(reference), ref_text="x")["param"] == "ref_audio"
    form = {"name": "me", "consent": "yes"}
    upload = custom_voice.http.post(VOICES, data=form, files={"audio_sample": reference})
    assert upload.status_code == 400 and "Base" in upload.json()["error"]["message"]


def test_what_a_base_model_needs_is_asked_for(base, reference):
    url = data_url(reference)
    assert refused(base, task_type="Base")["param"] == "ref_audio"
    assert refused(base, ref_audio=url)["param"] == "ref_text"
    assert refused(base, ref_audio=url, x_vector_only_mode=True, instructions="Shout.")["param"] == "instructions"
    assert refused(base, ref_audio=url, ref_text="a", voice="vivian")["param"] == "voice"
    assert refused(base, ref_audio="data:audio/wav;base64,AAAA", ref_text="a")["param"] == "ref_audio"


# What dies


def children(server):
    return psutil.Process(server.process.pid).children(recursive=True)


def process_of(server, stage):
    """The process of the talker's engine, or of the only module stage."""

    def is_it(process):
        if stage == "talker":
            return "EngineCore" in process.name()
        return "EngineCore" not in process.name() and "spawn_main" in " ".join(process.cmdline())

    (process,) = [child for child in children(server) if is_it(child)]
    return process


def assert_every_connection_is_answered(server):
    """Whatever file descriptors a stage that is gone has left free, and connections get now."""
    connections = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(50)]
    for connection in connections:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
    for connection in connections:
        with connection:
            assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("stage", ["talker", "decoder"])
def test_a_dead_stage_fails_its_requests_and_is_started_again(custom_voice, stage):
    restarts = custom_voice.http.get("/health").json()["stages"][stage]["restarts"]
    with ThreadPoolExecutor(1) as threads, streaming(custom_voice) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        whole = threads.submit(speak, custom_voice, status=500, **LONG, stream=False)
        wait_for(lambda: metric(custom_voice, "omni_requests_running") == 2, what="the second request")
        process_of(custom_voice, stage).send_signal(signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(pieces)
        error = whole.result()
        assert f"stage '{stage}' died while request speech-" in error.json()["error"]["message"]
    health = custom_voice.http.get("/health")
    assert health.status_code == 503
    states = {name: values["state"] for name, values in health.json()["stages"].items()}
    assert states == {"talker": "running", "decoder": "running", stage: "restarting"}
    refusal = speak(custom_voice, status=503)
    assert stage in refusal.json()["error"]["message"] and int(refusal.headers["retry-after"]) >= 1
    wait_for(lambda: custom_voice.http.get("/health").status_code == 200, 240, "the restart")
    assert custom_voice.http.get("/health").json()["stages"][stage]["restarts"] == restarts + 1
    assert_every_connection_is_answered(custom_voice)
    assert_golden(speak(custom_voice, **case("custom_voice")).content, "custom_voice")


def test_an_event_stream_whose_stage_dies_ends_with_an_error_that_names_it(custom_voice):
    with streaming(custom_voice, stream_format="sse") as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert json.loads(next(lines))["type"] == "speech.audio.delta"
        process_of(custom_voice, "decoder").send_signal(signal.SIGKILL)
        last = json.loads(list(lines)[-1])
    assert last["type"] == "error" and "stage 'decoder' died" in last["error"]["message"]
    wait_for(lambda: custom_voice.http.get("/health").status_code == 200, 240, "the restart")


# What grows


def test_sixty_requests_leave_memory_threads_and_files_flat(custom_voice):
    processes = [psutil.Process(custom_voice.process.pid), *children(custom_voice)]

    def measure():
        sizes = [process.memory_info().rss for process in processes]
        return sum(sizes), sum(p.num_threads() for p in processes), sum(p.num_fds() for p in processes)

    def generate(count):
        for index in range(count):
            speak(custom_voice, f"p{index}", seed=index, max_new_tokens=2)

    generate(20)  # caches, arenas and thread pools fill up
    memory, threads, files = measure()
    generate(60)
    later = measure()
    assert later[0] - memory < 20e6, f"{(later[0] - memory) / 1e6:.1f} MB in 60 requests"
    assert later[1] <= threads + 2 and later[2] <= files + 4


# The end


def under_way(server, **fields):
    """Begin a long request in a thread, and return once it gives sound."""
    begun = threading.Event()

    def read():
        try:
            with streaming(server, **fields) as answer:
                for _ in answer.iter_raw():
                    begun.set()
        except httpx.HTTPError:
            pass
        begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    return thread


def test_a_server_that_is_told_to_stop_leaves_nothing(custom_voice):
    left = children(custom_voice)
    assert len(left) >= 2
    reader = under_way(custom_voice)
    assert custom_voice.stop(signal.SIGTERM) == 0
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
    reader.join(10)
    assert not reader.is_alive()


def test_no_child_outlives_a_server_that_was_killed(base, reference):
    left = children(base)
    assert len(left) >= 3
    reader = under_way(base, voice=None, ref_audio=data_url(reference), x_vector_only_mode=True)
    base.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
    reader.join(10)
    assert not reader.is_alive()
