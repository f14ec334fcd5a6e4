#!/usr/bin/env python3
"""Whole requests through a real server on a CUDA device: stage times, memory, sleep and wake-up.

    python benchmarks/whole_request.py CHECKPOINT --steps 6 [--no-sleep] [arguments of vllm serve]

Starts `vllm serve CHECKPOINT --omni --enable-sleep-mode`, generates the family's default video (guided twice, then
unguided), puts the stage to sleep, wakes it, and generates once more: the bytes must be the first ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx


def main() -> None:
    """Run it and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-sleep", action="store_true", help="leave out sleep and wake-up")
    arguments, more = parser.parse_known_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [shutil.which("vllm", path=beside) or "vllm", "serve", arguments.checkpoint, "--omni"]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-sleep-mode",
        "--gpu-memory-utilization",
        "0.5",
        *more,
    ]
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client,
    ):
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            print(f"up after {until_healthy(client, server):.0f} s", flush=True)
            first = generate(client, arguments.steps)
            print(f"memory {memory()}")
            print(f"again: same bytes {generate(client, arguments.steps) == first}")
            generate(client, arguments.steps, guidance_scale=1.0)
            if arguments.no_sleep:
                return
            print(f"sleep: {post(client, '/v1/omni/sleep', {'level': 1})}, memory {memory()}")
            print(f"wake: {post(client, '/v1/omni/wakeup', {})}, memory {memory()}")
            print(f"after sleep: same bytes {generate(client, arguments.steps) == first}")
        finally:
            server.send_signal(signal.SIGINT)
            print(f"exit status {server.wait(60)}, memory {memory()}")


def until_healthy(client: httpx.Client, server: subprocess.Popen[bytes]) -> float:
    """Seconds until `/health` answered 200."""
    begin = time.monotonic()
    while server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return time.monotonic() - begin
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit("the server did not start")


def generate(client: httpx.Client, steps: int, **fields: object) -> bytes:
    """One video as a job; prints its times."""
    begin = time.monotonic()
    body = {"prompt": "a cat runs in the snow", "seed": 1, "num_inference_steps": steps, **fields}
    job = client.post("/v1/videos", json=body).raise_for_status().json()
    while job["status"] in ("queued", "in_progress"):
        time.sleep(0.1)
        job = client.get(f"/v1/videos/{job['id']}").json()
    phases = {phase: round(seconds, 2) for phase, seconds in (job["seconds_by_phase"] or {}).items()}
    print(
        f"{job['size']} {steps} steps {fields}: {job['status']}, {time.monotonic() - begin:.1f} s, {phases}", flush=True
    )
    return client.get(f"/v1/videos/{job['id']}/content").content


def post(client: httpx.Client, path: str, body: dict[str, object]) -> str:
    """Status and seconds of a request."""
    begin = time.monotonic()
    answer = client.post(path, json=body)
    return f"{answer.status_code}, {time.monotonic() - begin:.1f} s"


def memory() -> str:
    """What the driver says is in use."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
