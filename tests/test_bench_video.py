"""``omni bench video`` against our server and against small ones of others, good and bad, over loopback."""

import asyncio
import json
import math
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from omni_core.bench.check import BadOutput, Media, check, decode, probe
from omni_core.bench.load import choose_samples
from omni_core.bench.metrics import read_counters
from omni_core.bench.workload import Planned, Size, Workload, parse_field, parse_size
from omni_core.cli.main import main
from omni_core.media import encode_mp4

KNOWN = {"prompt", "model", "size", "seconds"}
"""Fields that OpenAI has; the small server refuses all others."""


def video(tmp_path, frames=6, width=64, height=32, fps=8, flat=False):
    picture = np.random.default_rng(0).integers(0, 255, (frames, height, width, 3), np.uint8)
    encode_mp4(np.full_like(picture, 90) if flat else picture, fps, tmp_path / "video.mp4")
    return (tmp_path / "video.mp4").read_bytes()


def other_server(content, *, queued=2, status="completed", fail_every=0, late=0.0):
    """An app with OpenAI's routes and nothing of ours: no metrics, no phases, forms only, no unknown field."""
    app, looks = FastAPI(), {}
    app.state.bodies, app.state.deleted = [], []

    @app.post("/v1/videos")
    async def create(request: Request):
        form = dict(await request.form())
        app.state.bodies.append(form)
        if not request.headers["content-type"].startswith("multipart/form-data") or not set(form) <= KNOWN:
            return JSONResponse({"error": {"message": f"unknown: {set(form) - KNOWN}"}}, 400)
        if fail_every and len(app.state.bodies) % fail_every == 0:
            return JSONResponse({"detail": "too many"}, 429)
        job = f"job-{len(looks)}"
        looks[job] = 0
        return {"id": job, "status": "queued"}

    @app.get("/v1/videos/{job}")
    async def get(job: str):
        looks[job] += 1
        if looks[job] <= queued:
            return {"id": job, "status": "queued"}
        return {"id": job, "status": status, "error": {"message": "no luck"} if status == "failed" else None}

    @app.get("/v1/videos/{job}/content")
    async def fetch(job: str):
        await asyncio.sleep(late)
        return Response(content, media_type="video/mp4")

    @app.delete("/v1/videos/{job}")
    async def delete(job: str):
        app.state.deleted.append(job)
        return {}

    return app


@contextmanager
def serving(app):
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the small server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def bench(tmp_path, capsys):
    """Run ``omni bench video`` and give its exit status, what it wrote as JSON (if it did), and what it said."""

    def run(url, *words):
        file = tmp_path / "bench.json"
        status = main(["bench", "video", "--base-url", url, "--json", str(file), "--poll-interval", "0.05", *words])
        return status, json.loads(file.read_text()) if file.exists() else None, capsys.readouterr()

    return run


# Against our own server


@pytest.mark.serve
def test_a_sweep_over_our_server(toy_server, bench):
    status, result, said = bench(
        toy_server.url + "/v1", "--model", "toy", "--num-requests", "4", "--concurrency", "1", "2",
        "--size", "64x32", "32x32", "--num-frames", "5", "--num-inference-steps", "4", "--seed", "3",
        "--field", "fps=8", "--field", "step_seconds=0.05",
    )  # fmt: skip

    assert status == 0, said.err
    one, two = result["runs"]
    assert (one["concurrency"], two["concurrency"]) == (1, 2)
    for run in (one, two):
        summary = run["summary"]
        assert (summary["requests"], summary["failures"], summary["checked"]) == (4, {}, 4)
        assert set(summary["phases"]) == {"encode", "denoise", "decode", "file"}
        assert summary["latency"]["p50"] >= 4 * 0.05
        assert math.isclose(summary["frames_per_second"], 20 / summary["duration"])
        assert math.isclose(summary["video_seconds_per_second"], 20 / 8 / summary["duration"])
        assert [row["seed"] for row in run["requests"]] == [3, 4, 5, 6]
        assert [row["size"] for row in run["requests"]] == ["64x32", "32x32"] * 2
        assert set(run["by_size"]) == {"64x32", "32x32"}
        assert run["by_size"]["64x32"]["requests"] == 2
    assert one["batching"]["mean_batch_size"] == 1
    assert one["batching"]["forwards"] == 4 * 4
    assert one["batching"]["seconds_per_forward"] >= 0.05
    for line in ("requests/s", "latency p99 (s)", "server's denoise, mean (s)", "mean batch size"):
        assert line in said.out


@pytest.mark.serve
def test_requests_of_one_size_share_forwards(toy_server, bench):
    status, result, _ = bench(
        toy_server.url, "--num-requests", "4", "--concurrency", "2", "--num-inference-steps", "4",
        "--field", "step_seconds=0.1", "--num-warmups", "0",
    )  # fmt: skip

    assert status == 0
    assert result["runs"][0]["batching"]["mean_batch_size"] > 1.4


@pytest.mark.serve
def test_synchronous_requests_at_a_rate(toy_server, bench):
    status, result, _ = bench(
        toy_server.url, "--mode", "sync", "--body", "json", "--request-rate", "20", "--num-requests", "4",
        "--concurrency", "1", "--field", "step_seconds=0.05", "--seconds", "0.6", "--num-warmups", "0",
    )  # fmt: skip

    assert status == 0
    [run] = result["runs"]
    assert run["summary"]["queue"] is None
    assert run["summary"]["held_back"]["p99"] > 0, "one at a time takes longer than they come"
    assert set(run["summary"]["phases"]) == {"inference"}
    assert result["workload"]["request_rate"] == 20


@pytest.mark.serve
def test_the_time_in_the_queue_is_seen(toy_server, bench):
    status, result, _ = bench(
        toy_server.url, "--num-requests", "4", "--concurrency", "4", "--field", "step_seconds=0.15",
        "--num-warmups", "0",
    )  # fmt: skip

    assert status == 0
    waits = sorted(row["queue"] for row in result["runs"][0]["requests"])
    assert waits[1] < 0.6 < waits[2], "two run at once, two wait for them"


@pytest.mark.serve
def test_refusals_are_counted_and_told(toy_server, bench):
    words = ["--num-requests", "2", "--num-warmups", "0", "--num-frames", "6"]
    status, result, said = bench(toy_server.url, *words)

    assert status == 1
    assert result["runs"][0]["summary"]["failures"] == {"http 400": 2}
    assert "must be of the form 4k+1" in said.out
    assert bench(toy_server.url, *words, "--allow-failures")[0] == 0


@pytest.mark.serve
def test_a_request_that_takes_too_long_is_ended_on_the_server_too(toy_server, bench):
    status, result, _ = bench(
        toy_server.url, "--num-requests", "1", "--num-warmups", "0", "--timeout", "0.5",
        "--num-inference-steps", "1000", "--field", "step_seconds=0.05",
    )  # fmt: skip

    assert status == 1
    [row] = result["runs"][0]["requests"]
    assert (row["failure"], row["latency"]) == ("timeout", None)
    assert toy_server.http.get(f"/v1/videos/{row['job']}").status_code == 404


# Against servers of others


def test_a_server_without_our_extras(tmp_path, bench):
    app = other_server(video(tmp_path))
    with serving(app) as url:
        status, result, said = bench(
            url, "--num-requests", "3", "--size", "64x32", "--model", "sora", "--api-key", "secret"
        )

    assert status == 0, said
    assert [set(body) for body in app.state.bodies] == [{"prompt", "model", "size"}] * 4, "three and the warm-up"
    [run] = result["runs"]
    assert run["batching"] is None and run["summary"]["phases"] == {}
    assert run["summary"]["queue"]["p50"] >= 2 * 0.05
    assert "server's" not in said.out and "batch" not in said.out
    assert "secret" not in json.dumps(result)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (lambda path: b"\0" * 5000, (), "is no video"),
        (lambda path: b"", (), "the file is empty"),
        (lambda path: video(path)[:2000], (), "the file"),
        (lambda path: video(path, flat=True), (), "of one colour"),
        (lambda path: video(path, width=32), ("--size", "64x32"), "is 32x32, not 64x32"),
        (lambda path: video(path, frames=1), ("--seconds", "4"), "lasts 0.12 s, not 4 s"),
    ],
    ids=["zeros", "empty", "cut", "flat", "size", "short"],
)
def test_a_file_that_is_not_the_video_asked_for_is_a_failure(tmp_path, bench, content, words, message):
    with serving(other_server(content(tmp_path), queued=0)) as url:
        status, result, said = bench(url, "--num-requests", "1", "--num-warmups", "0", *words)

    assert status == 1
    [run] = result["runs"]
    assert run["summary"]["failures"] == {"bad output": 1}
    assert run["summary"]["requests_per_second"] == 0 and run["summary"]["latency"] is None
    assert message in run["requests"][0]["error"] and message in said.out


def test_failures_are_counted_by_kind(tmp_path, bench):
    with serving(other_server(video(tmp_path), queued=0, fail_every=2)) as url:
        status, result, said = bench(url, "--num-requests", "4", "--num-warmups", "0")
    assert status == 1
    assert result["runs"][0]["summary"]["failures"] == {"http 429": 2}
    assert "too many" in said.out

    with serving(other_server(video(tmp_path), queued=0, status="failed")) as url:
        status, result, said = bench(url, "--num-requests", "2", "--num-warmups", "0")
    assert result["runs"][0]["summary"]["failures"] == {"job failed": 2}
    assert "no luck" in said.out


def test_a_slow_download_is_a_timeout_and_the_job_is_deleted(tmp_path, bench):
    app = other_server(video(tmp_path), queued=0, late=5)
    with serving(app) as url:
        status, result, _ = bench(url, "--num-requests", "1", "--num-warmups", "0", "--timeout", "0.3")
    assert status == 1
    assert result["runs"][0]["summary"]["failures"] == {"timeout": 1}
    assert app.state.deleted == ["job-0"]


def test_a_job_is_not_polled_faster_than_it_may_be(tmp_path, bench):
    app = other_server(video(tmp_path), queued=5)
    with serving(app) as url:
        _, result, _ = bench(url, "--num-requests", "1", "--num-warmups", "0")
    assert result["runs"][0]["requests"][0]["queue"] >= 6 * 0.05


# What is wrong is one line


def test_no_server_is_one_line(bench):
    with serving(FastAPI()) as url:
        pass
    status, result, said = bench(url, "--num-requests", "1")
    assert (status, result) == (1, None)
    [line] = [line for line in said.err.splitlines() if line.startswith("omni: error: ")]
    assert "the warm-up failed" in line and f"cannot connect to {url}" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "832"], "--size '832' must look like 832x480"),
        (["--size", "832x480:0"], "with a weight above 0"),
        (["--field", "fps"], "--field 'fps' must look like name=value"),
        (["--prompt-file", "/no/such/file"], "cannot read --prompt-file /no/such/file"),
        (["--poll-interval", "0.01"], "--poll-interval 0.01 must be at least 0.05 s"),
        (["--base-url", "localhost:8000"], "must look like http://HOST:PORT"),
        (["--base-url", "http://"], "must look like http://HOST:PORT"),
        (["--base-url", "http://127.0.0.1:x"], "--base-url 'http://127.0.0.1:x'"),
        (["--json", "/no/such/folder/bench.json"], "there is no folder /no/such/folder"),
    ],
)
def test_a_wrong_option_is_one_line(words, message, capsys):
    assert main(["bench", "video", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


# The parts


def test_a_plan_is_the_same_each_time_and_sends_only_what_was_asked_for():
    workload = Workload(4, sizes=[Size(64, 32), Size(32, 32)], request_rate=2.0)
    assert workload.plan() == workload.plan()
    assert {name for planned in workload.plan() for name in planned.fields} == {"prompt", "size"}
    dues = [planned.due for planned in workload.plan()]
    assert dues == sorted(dues) and dues[0] == 0 and dues[-1] > 0


def test_sizes_are_drawn_by_weight():
    workload = Workload(400, sizes=[parse_size("832x480:3"), parse_size("480x832")], seed=1)
    wide = sum(str(planned.size) == "832x480" for planned in workload.plan())
    assert 260 < wide < 340


def test_arrivals_come_at_the_rate():
    plan = Workload(2000, request_rate=10.0, seed=1).plan()
    assert 180 < plan[-1].due < 220


def test_fields_are_json_or_strings():
    assert parse_field("fps=24") == ("fps", 24)
    assert parse_field("negative_prompt=blurry, dark") == ("negative_prompt", "blurry, dark")
    assert parse_field("word=NaN") == ("word", "NaN")
    assert parse_field('extra_params={"a": 1}') == ("extra_params", {"a": 1})


def test_samples_are_spread_over_every_size():
    plan = Workload(8, sizes=[Size(64, 32), Size(32, 32)]).plan()
    assert choose_samples(plan, 2) == {0, 6, 1, 7}
    assert choose_samples(plan, 0) == set()
    assert choose_samples(plan, 100) == set(range(8))


def test_what_a_file_holds(tmp_path):
    data = video(tmp_path)
    assert probe(data) == Media(64, 32, 6, 8.0)
    media = decode(data)
    assert (media.frames, media.fps) == (6, 8.0) and media.deviation > 10
    asked = Planned(0, Size(64, 32), {})
    check(media, asked, Workload(1, num_frames=6, fields={"fps": 8}))
    check(media, asked, Workload(1, seconds=0.75))
    for workload in (Workload(1, num_frames=5), Workload(1, fields={"fps": 16}), Workload(1, seconds=3)):
        with pytest.raises(BadOutput):
            check(media, asked, workload)


def test_counters_add_up_over_stages():
    text = """
# TYPE omni_denoise_forwards_total counter
omni_denoise_forwards_total{stage="a"} 4.0
omni_denoise_forwards_total{stage="b"} 6.0
omni_denoise_steps_total{stage="a"} 12.0
omni_denoise_steps_total{stage="b"} 6.0
omni_phase_seconds_total{phase="encode",stage="a"} 50.0
omni_phase_seconds_total{stage="a",phase="denoise"} 2.5
vllm:num_requests_running{engine="0"} 1.0
"""
    before = read_counters(text.replace(" 4.0", " 2.0").replace("12.0", "4.0").replace("2.5", "1.5"))
    batching = read_counters(text).since(before)
    assert (batching.forwards, batching.mean_batch_size, batching.seconds_per_forward) == (2, 4.0, 0.5)
    assert read_counters(text).since(read_counters(text)) is None
    assert read_counters("vllm:num_requests_running 1.0") is None


def test_the_client_needs_neither_vllm_nor_torch():
    script = (
        "import sys, omni_core.cli.bench, omni_core.bench.load, omni_core.bench.report;"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
