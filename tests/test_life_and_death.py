"""What is left when a server ends, however it ends."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.serve

SLOW = {"prompt": "a cat", "num_inference_steps": 1000, "step_seconds": 0.02}


@pytest.fixture
def server(start_server, toy_site, toy_checkpoint, tmp_path):
    results = tmp_path / "results"
    path = os.pathsep.join([*toy_site, os.environ.get("PYTHONPATH", "")])
    server = start_server(
        str(Path(os.sys.executable).parent / "omni"), "serve", str(toy_checkpoint),
        env={"PYTHONPATH": path, "OMNI_RESULTS_DIR": str(results)},
    )  # fmt: skip
    server.results = results
    server.children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(server.children) >= 2
    yield server
    server.process.kill()


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


def test_a_dead_worker_fails_the_requests_that_needed_it_and_health_says_so(server):
    job = running(server)
    worker = next(child for child in reversed(server.children) if "Worker" in child.name() or not child.children())
    worker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    seen = {}
    while time.monotonic() < deadline:
        try:
            seen = server.http.get(f"/v1/videos/{job['id']}").json()
            health = server.http.get("/health").status_code
        except OSError:
            break
        except Exception:
            break
        if seen["status"] == "failed":
            assert "diffusion" in seen["error"]["message"] and job["id"] in seen["error"]["message"]
            assert health == 503
            return
        time.sleep(0.02)
    pytest.fail(f"the job did not fail: {seen}")
