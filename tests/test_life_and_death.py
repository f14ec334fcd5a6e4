"""What is left when a server ends, however it ends."""

import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.serve

SLOW = {"prompt": "a cat", "num_inference_steps": 1000, "step_seconds": 0.02}


@pytest.fixture
def server(make_server):
    """One rank: the worker lives in the engine's process."""
    return make_server()


@pytest.fixture
def server_mp(make_server):
    """A worker in a process of its own."""
    return make_server("--distributed-executor-backend", "mp")


@pytest.fixture
def make_server(serve_toy, tmp_path):
    made = []

    def make(*flags):
        made.append(_start(serve_toy, tmp_path, flags))
        return made[-1]

    yield make
    for server in made:
        server.process.kill()
        shutil.rmtree(server.temporary, ignore_errors=True)


def _start(serve_toy, tmp_path, flags):
    results = tmp_path / "results"
    temporary = Path(tempfile.mkdtemp(prefix="o-"))  # short, since addresses of sockets are
    server = serve_toy(*flags, env={"OMNI_RESULTS_DIR": str(results), "TMPDIR": str(temporary)})
    server.results, server.temporary = results, temporary
    server.children = psutil.Process(server.process.pid).children(recursive=True)
    assert any("EngineCore" in child.name() for child in server.children)
    return server


def running(server):
    job = server.http.post("/v1/videos", json=SLOW).json()
    deadline = time.monotonic() + 10
    while server.http.get(f"/v1/videos/{job['id']}").json()["status"] != "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return job


def test_no_child_outlives_a_server_that_was_killed(server):
    running(server)
    server.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(server.children, timeout=10)
    assert not alive


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_leaves_nothing(server, how):
    running(server)
    assert server.stop(how) == 0
    _, alive = psutil.wait_procs(server.children, timeout=10)
    assert not alive
    assert list(server.results.iterdir()) == []
    assert [path.name for path in server.temporary.iterdir() if not path.name.startswith("torchinductor")] == []


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_a_dead_engine_fails_its_requests_and_the_stage_is_started_again(victim, request):
    server = request.getfixturevalue("server" if victim == "EngineCore" else "server_mp")
    job = running(server)
    process = next(child for child in server.children if victim in child.name())
    process.send_signal(signal.SIGKILL)
    failed = wait_for(lambda: (now := server.http.get(f"/v1/videos/{job['id']}").json())["status"] == "failed" and now)
    assert "stage 'diffusion' died" in failed["error"]["message"] and job["id"] in failed["error"]["message"]
    health = server.http.get("/health")
    assert health.status_code == 503
    assert health.json()["stages"]["diffusion"]["state"] == "restarting"
    assert server.http.post("/v1/videos", json={"prompt": "a cat"}).status_code == 503
    refused = server.http.post("/v1/videos/sync", json={"prompt": "a cat"})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert "restarting" in refused.json()["error"]["message"]
    wait_for(lambda: server.http.get("/health").status_code == 200, 120)
    assert server.http.post("/v1/videos/sync", json={"prompt": "a cat"}).status_code == 200
    assert server.http.get("/health").json()["stages"]["diffusion"]["restarts"] == 1
    assert len(list(server.results.iterdir())) == 1, "the results of the dead engine are gone"


def wait_for(predicate, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def test_two_hundred_requests_leave_memory_threads_and_files_flat(toy_server):
    processes = [
        psutil.Process(toy_server.process.pid),
        *psutil.Process(toy_server.process.pid).children(recursive=True),
    ]

    def measure():
        sizes = [process.memory_info().rss for process in processes]
        return sum(sizes), sum(p.num_threads() for p in processes), sum(p.num_fds() for p in processes)

    def generate(count):
        for i in range(count):
            answer = toy_server.http.post("/v1/videos/sync", json={"prompt": f"p{i}", "num_frames": 9, "seed": i})
            assert answer.status_code == 200

    generate(60)  # caches, arenas and thread pools fill up
    memory, threads, files = measure()
    generate(200)
    later = measure()
    assert later[0] - memory < 30e6, f"{(later[0] - memory) / 1e6:.1f} MB in 200 requests"
    assert later[1] <= threads + 2 and later[2] <= files + 4


def test_metrics_count_what_was_done(toy_server):
    def value(name, **labels):
        text = toy_server.http.get("/metrics").text
        wanted = [f'{key}="{label}"' for key, label in {"stage": "diffusion", **labels}.items()]
        lines = [line for line in text.splitlines() if line.startswith(name + "{") and all(w in line for w in wanted)]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    done = value("omni_requests_total", outcome="done")
    steps = value("omni_denoise_steps_total")
    toy_server.http.post("/v1/videos/sync", json={"prompt": "a cat", "num_inference_steps": 7})
    toy_server.http.post("/v1/videos/sync", json={"prompt": "a cat", "fail_in": "start"})
    assert value("omni_requests_total", outcome="done") == done + 1
    assert value("omni_requests_total", outcome="error") >= 1
    assert value("omni_denoise_steps_total") == steps + 7
    assert value("omni_stage_up") == 1 and value("omni_requests_running") == 0 and value("omni_requests_waiting") == 0
    assert value("omni_phase_seconds_total", phase="denoise") > 0
    assert value("omni_request_phase_seconds_count", phase="queue") >= 1
    assert value("omni_request_phase_seconds_count", phase="decode") >= 1


def test_sleep_is_refused_where_the_stage_was_not_started_for_it(toy_server):
    answer = toy_server.http.post("/v1/omni/sleep", json={"level": 1})
    assert answer.status_code == 400 and "--enable-sleep-mode" in answer.json()["error"]["message"]
    assert toy_server.http.get("/health").json()["stages"]["diffusion"]["state"] == "running"
    for wrong in ({"level": 2}, {"level": "1"}, {"stages": ["nope"]}, {"mode": "x"}, {"nonsense": 1}):
        answer = toy_server.http.post("/v1/omni/sleep", json=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in next(iter(wrong))
    assert toy_server.http.post("/v1/omni/wakeup").status_code == 200
