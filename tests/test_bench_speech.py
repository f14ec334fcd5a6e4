"""``omni bench speech`` against small servers whose packets come when a test says, over loopback."""

import asyncio
import json
import math

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from test_bench_video import serving

from omni_core.bench.speech import Speech, SpeechRow, _lag, summarize
from omni_core.cli.main import main

RATE = 24000
SECOND = b"\1\0" * RATE
LATE = 0.25
"""Seconds that a busy machine may be late."""


def packets(*lengths):
    return [SECOND[: 2 * round(RATE * length)] for length in lengths]


def speech_server(sound, waits, *, fail_every=0, breaks=False, headers=None, media_type="audio/pcm"):
    """An app that sends each packet of ``sound`` after its wait; every so often an error, or no proper end."""
    app = FastAPI()
    app.state.bodies, app.state.now, app.state.most = [], 0, 0

    @app.post("/v1/audio/speech")
    async def speak(request: Request):
        app.state.bodies.append(await request.json())
        if fail_every and len(app.state.bodies) % fail_every == 0:
            return JSONResponse({"error": {"message": "too many"}}, 429)

        async def stream():
            app.state.now += 1
            app.state.most = max(app.state.most, app.state.now)
            for wait, packet in zip(waits, sound, strict=True):
                await asyncio.sleep(wait)
                yield packet
            app.state.now -= 1
            if breaks:
                await asyncio.sleep(0.05)
                raise ConnectionError("the small server broke off")

        return StreamingResponse(stream(), headers=headers, media_type=media_type)

    return app


@pytest.fixture
def bench(tmp_path, capsys):
    """Run ``omni bench speech`` and give its exit status, the lines that it wrote as JSON, and what it said."""

    def run(url, *words):
        file = tmp_path / "bench.json"
        status = main(["bench", "speech", "--base-url", url, "--json", str(file), *words])
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else None
        return status, lines, capsys.readouterr()

    return run


def test_a_sweep_over_a_server_that_never_stalls(bench):
    app = speech_server(packets(0.5, 0.5, 0.5), (0.2, 0.1, 0.1))
    with serving(app) as url:
        status, lines, said = bench(
            url + "/v1", "--concurrency", "1", "3", "--rounds", "2", "--model", "m", "--voice", "v", "--seed", "5",
            "--field", "max_new_tokens=7", "--api-key", "secret",
        )  # fmt: skip

    assert status == 0, said.err
    assert [(line["concurrency"], line["requests"], line["failures"]) for line in lines] == [(1, 2, {}), (3, 6, {})]
    assert app.state.most == 3
    for line in lines:
        assert 0.2 <= line["first_audio"]["p50"] <= line["first_audio"]["p99"] < 0.2 + LATE
        assert 0.4 <= line["latency"]["p50"] < 0.4 + LATE
        assert math.isclose(line["real_time_factor"]["p50"], line["latency"]["p50"] / 1.5)
        assert -0.4 - 0.01 <= line["worst_lag"] < -0.4 + LATE and line["stalled"] == 0
        assert line["shortest"] == line["longest"] == 1.5
        assert math.isclose(line["audio_per_second"], 1.5 * line["requests"] / line["duration"])
        assert 0.8 <= line["duration"] < 0.8 + 2 * LATE, "two rounds, one after the other"
        assert [row["seed"] for row in line["rows"]] == [5 + i for i in range(line["requests"])]
    assert app.state.bodies[0] == {
        "input": app.state.bodies[0]["input"], "model": "m", "voice": "v", "response_format": "pcm", "stream": True,
        "stream_format": "audio", "seed": 5, "max_new_tokens": 7,
    }  # fmt: skip
    assert len(app.state.bodies) == 1 + 2 + 3 + 6, "each run has its warm-up"
    assert lines[1]["steady_audio_per_second"] > 3
    for name in ("audio seconds/s", "first audio p99 (s)", "real-time factor p50", "latency p99 (s)", "worst lag (s)"):
        assert name in said.out
    assert "secret" not in json.dumps(lines)


def test_a_player_that_waits_is_seen(bench):
    with serving(speech_server(packets(0.1, 1.0, 1.0), (0.0, 0.5, 0.1))) as url:
        status, [line], said = bench(url, "--concurrency", "2", "--rounds", "1", "--num-warmups", "0")

    assert status == 0, said.err
    assert line["stalled"] == 2
    assert 0.4 - 0.05 <= line["worst_lag"] < 0.4 + LATE, "0.1 s of sound, and 0.5 s without more"


def test_starts_are_spread(bench):
    app = speech_server(packets(0.1), (0.0,))
    with serving(app) as url:
        _, [line], _ = bench(
            url, "--concurrency", "4", "--spread", "0.8", "--rounds", "1", "--num-warmups", "0",
            "--text", "Hi", "--field", "stream=null",
        )  # fmt: skip

    for row in line["rows"]:
        assert 0.2 * row["stream"] - 0.01 <= row["started"] < 0.2 * row["stream"] + LATE
    assert line["worst_lag"] is None, "one packet is never late"
    assert app.state.bodies == 4 * [{"input": "Hi", "response_format": "pcm", "stream_format": "audio"}]


def test_errors_are_counted_and_not_averaged_in(bench):
    with serving(speech_server(packets(0.5), (0.2,), fail_every=2)) as url:
        words = ("--rounds", "4", "--num-warmups", "0")
        status, [line], said = bench(url, *words)
        assert bench(url, *words, "--allow-failures")[0] == 0

    assert status == 1
    assert (line["requests"], line["failures"]) == (4, {"http 429": 2})
    assert line["latency"]["mean"] >= 0.2 and line["shortest"] == 0.5
    assert math.isclose(line["audio_per_second"], 2 * 0.5 / line["duration"])
    assert [row["latency"] is None for row in line["rows"]] == [False, True, False, True]
    assert "http 429" in said.out and "too many" in said.out


@pytest.mark.parametrize(
    ("server", "kind", "message"),
    [
        (speech_server(packets(0.5, 0.25), (0, 0), breaks=True), "truncated", "broken off after 0.75 s"),
        (speech_server([SECOND, b"\1"], (0, 0)), "truncated", "48001 bytes end within a sample"),
        (speech_server([], ()), "bad output", "the sound is empty"),
        (speech_server([bytes(4800)], (0,)), "bad output", "silent throughout"),
        (speech_server([b"RIFF" + SECOND], (0,)), "bad output", "begins with b'RIFF', not raw pcm"),
        (speech_server([b"{}"], (0,), media_type="application/json"), "bad output", "is application/json, not sound"),
        (speech_server([SECOND], (0,), headers={"X-Sample-Rate": "16000"}), "bad output", "has 16000 samples a second"),
    ],
    ids=["broken", "half", "empty", "silent", "file", "json", "rate"],
)
def test_an_answer_that_is_not_the_sound_asked_for_is_a_failure(bench, server, kind, message):
    with serving(server) as url:
        status, [line], said = bench(url, "--rounds", "2", "--num-warmups", "0")

    assert status == 1
    assert (line["failures"], line["audio_per_second"], line["stalled"]) == ({kind: 2}, 0, 0)
    assert line["first_audio"] is line["latency"] is line["worst_lag"] is line["shortest"] is None
    assert message in line["rows"][0]["error"] and message in said.out


def test_a_content_length_that_is_not_reached_is_truncation(bench):
    app = speech_server(packets(0.5), (0,), headers={"Content-Length": str(len(SECOND))})
    with serving(app) as url:
        _, [line], _ = bench(url, "--rounds", "1", "--num-warmups", "0")
    assert line["failures"] == {"truncated": 1}


def test_a_stream_that_hangs_is_a_timeout(bench):
    with serving(speech_server(packets(0.5, 0.5), (0, 1.5))) as url:
        _, [line], _ = bench(url, "--rounds", "1", "--num-warmups", "0", "--timeout", "0.3")
    assert line["failures"] == {"timeout": 1}


def test_no_server_is_one_line_and_without_a_warm_up_counted(bench):
    with serving(FastAPI()) as url:
        pass
    status, lines, said = bench(url)
    assert (status, lines) == (1, None)
    assert f"the warm-up failed, nothing was measured: connect: cannot connect to {url}" in said.err

    status, [line], said = bench(url, "--num-warmups", "0", "--concurrency", "2", "--rounds", "2")
    assert (status, line["failures"]) == (1, {"connect": 4})


def test_a_warm_up_that_fails_in_part_is_told(bench):
    with serving(speech_server(packets(0.1), (0,), fail_every=2)) as url:
        _, lines, said = bench(url, "--concurrency", "2", "--rounds", "1")
    assert len(lines) == 1
    assert "1 of 2 requests of the warm-up failed: http 429: too many" in said.err


def test_texts_are_taken_in_turn(bench, tmp_path):
    (tmp_path / "texts").write_text("One.\n\nTwo.\n")
    app = speech_server(packets(0.1), (0,))
    with serving(app) as url:
        bench(url, "--texts", str(tmp_path / "texts"), "--rounds", "3", "--num-warmups", "0")
    assert [body["input"] for body in app.state.bodies] == ["One.", "Two.", "One."]
    assert all("seed" not in body for body in app.state.bodies)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--texts", "/no/such/file"], "cannot read --texts /no/such/file"),
        (["--field", "fps"], "--field 'fps' must look like name=value"),
        (["--base-url", "localhost:8000"], "must look like http://HOST:PORT"),
        (["--json", "/no/such/folder/bench.json"], "there is no folder /no/such/folder"),
    ],
)
def test_a_wrong_option_is_one_line(words, message, capsys):
    assert main(["bench", "speech", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def row(stream, index, started, *arrivals):
    made = SpeechRow(index, stream=stream, started=started, latency=arrivals[-1] - started)
    made.packets = [(when, len(SECOND)) for when in arrivals]
    made.audio_seconds, made.first_audio = float(len(arrivals)), arrivals[0] - started
    made.lag = _lag(made.packets, Speech()) if len(arrivals) > 1 else None
    return made


def test_the_figures_of_known_packets():
    rows = [row(0, 0, 0.0, 0.5, 1.0), row(1, 1, 1.0, 1.5, 3.0), row(0, 2, 1.0, 2.0, 2.5)]
    figures = summarize(rows, 2, Speech())
    assert (figures.duration, figures.audio_per_second) == (3.0, 2.0)
    assert figures.steady_audio_per_second == 4 / 1.5, "from 1 to 2.5 s: four packets, one of them at its begin"
    assert (figures.worst_lag, figures.stalled) == (0.5, 1)
    assert (figures.first_audio.p50, figures.latency.p50) == (0.5, 1.5)
