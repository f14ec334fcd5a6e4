"""What tests of the whole share: the toy family, tiny checkpoints, real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

TOY = Path(__file__).parent / "toy"
ROOT = Path(__file__).parent.parent

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CACHE_ROOT", str(ROOT / ".omni" / "vllm-cache"))

sys.path.insert(0, str(TOY))  # for ``reference``, what the toy model must give


@pytest.fixture(scope="session")
def toy_site(tmp_path_factory):
    """Path entries on which the toy family is an installed distribution."""
    site = tmp_path_factory.mktemp("site")
    info = site / "omni_plugin_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-plugin-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[omni_core.plugins]\ntoy = omni_plugin_toy.plugin\n")
    return [str(site), str(TOY)]


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy-checkpoint")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    return folder


@pytest.fixture(scope="session")
def wan_checkpoint(tmp_path_factory):
    from omni_plugin_wan22.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("wan-checkpoint")
    write_checkpoint(folder)
    return folder


class Server:
    """A real server in a process of its own, on a port of the loopback interface that the kernel chose."""

    def __init__(self, command, log, env=None):
        self.log = log
        self.process = subprocess.Popen(
            command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, cwd=log.parent
        )
        self.port = self._wait_for_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _wait_for_port(self, seconds=180):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            text = self.log.read_text(errors="replace")
            found = re.search(r"Serving .* on http://127\.0\.0\.1:(\d+)", text)
            if found and "Application startup complete" in text:
                return int(found[1])
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        self.process.kill()
        raise AssertionError(f"the server did not start:\n{self.log.read_text(errors='replace')[-6000:]}")

    def stop(self, how=signal.SIGTERM):
        self.http.close()
        self.process.send_signal(how)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Start a server with the given command line; stopped when the session ends, if not before."""
    servers = []

    def start(*command, env=None):
        log = tmp_path_factory.mktemp("server") / "log"
        server = Server([*command, "--host", "127.0.0.1", "--port", "0"], log, env)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def serve_toy(start_server, toy_site, toy_checkpoint):
    """``omni serve`` of the toy family: ``serve_toy(*flags, env={...})``."""
    path = os.pathsep.join([*toy_site, os.environ.get("PYTHONPATH", "")])

    def serve(*flags, env=None):
        command = (str(BIN / "omni"), "serve", str(toy_checkpoint), *flags)
        return start_server(*command, env={"PYTHONPATH": path, **(env or {})})

    return serve


@pytest.fixture(scope="session")
def toy_server(serve_toy):
    """The toy family: two requests at a time, three may wait."""
    return serve_toy("--served-model-name", "toy", "toy-too", "--max-num-seqs", "2", "--max-queued-requests", "3")


@pytest.fixture(scope="session")
def wan_server(start_server, wan_checkpoint):
    """``vllm serve MODEL --omni`` of a tiny Wan checkpoint."""
    return start_server(str(BIN / "vllm"), "serve", str(wan_checkpoint), "--omni", "--served-model-name", "wan")
