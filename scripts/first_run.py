#!/usr/bin/env python3
"""First run: make a tiny checkpoint, serve it, ask for a video or for speech over HTTP, and say where the result is.

The checkpoint has random weights in the genuine layout of Wan2.2's text-to-video A14B, or of Qwen3-TTS CustomVoice, so
the video is an abstract pattern and the speech is noise; what is shown is the whole path from `omni serve` to the file.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from omni_core.media import contact_sheet, decode_video

ROOT = Path(__file__).resolve().parent.parent
FRAMES_PER_SECOND, SAMPLE_RATE, WAV_HEADER_BYTES = 12.5, 24_000, 44
console = Console(highlight=False)


def main() -> int:
    """Run it; 0 if there is a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("video", "speech"), default="video", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for everything it writes (default: .omni/first-run/WHAT)")
    parser.add_argument("--prompt", default="a cat runs in the snow", help="what to show, or to say")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    video = parser.add_argument_group("video")
    video.add_argument("--size", default="256x144", help="WIDTHxHEIGHT, multiples of 16 (default: %(default)s)")
    video.add_argument("--frames", type=int, default=17, help="a number of the form 4k+1 (default: %(default)s)")
    video.add_argument("--fps", type=int, default=8, help="default: %(default)s")
    video.add_argument("--steps", type=int, default=30, help="denoising steps (default: %(default)s)")
    speech = parser.add_argument_group("speech")
    speech.add_argument("--voice", default="vivian", help="default: %(default)s")
    speech.add_argument("--seconds", type=float, default=4.0, help="the most speech (default: %(default)s)")
    arguments = parser.parse_args()

    out = arguments.out or ROOT / ".omni" / "first-run" / arguments.what
    out.mkdir(parents=True, exist_ok=True)
    (make_video if arguments.what == "video" else make_speech)(arguments, out)
    console.print(f"  server log     {out / 'server.log'}")
    return 0


def make_video(arguments: argparse.Namespace, out: Path) -> None:
    """Serve Wan, and write a video."""
    checkpoint = make_checkpoint(out / "checkpoint", "omni_plugin_wan22.checkpoints")
    body = {
        "prompt": arguments.prompt,
        "size": arguments.size,
        "num_frames": arguments.frames,
        "fps": arguments.fps,
        "num_inference_steps": arguments.steps,
        "seed": arguments.seed,
    }
    with serve(checkpoint, out / "server.log") as client:
        content = generate(client, body)
    video, sheet = out / "video.mp4", out / "contact-sheet.png"
    video.write_bytes(content)
    frames, fps = decode_video(video)
    contact_sheet(frames, sheet)
    count, height, width, _ = frames.shape
    console.print(f"[bold]{count} frames of {width}x{height} at {fps:g} frames per second[/bold]")
    console.print(f"  video          {video}\n  contact sheet  {sheet}")


def make_speech(arguments: argparse.Namespace, out: Path) -> None:
    """Serve Qwen3-TTS, and write a sound file while it is made."""
    checkpoint = make_checkpoint(out / "checkpoint", "omni_plugin_qwen3_tts.checkpoints", "--kind", "custom-voice")
    body = {
        "input": arguments.prompt,
        "voice": arguments.voice,
        "response_format": "wav",
        "max_new_tokens": max(1, round(arguments.seconds * FRAMES_PER_SECOND)),
        "seed": arguments.seed,
        "stream": True,
    }
    speech = out / "speech.wav"
    flags = ("--max-model-len", "1024", "--max-num-seqs", "8")
    with serve(checkpoint, out / "server.log", *flags) as client, speech.open("wb") as file:
        begin, first, size = time.monotonic(), 0.0, 0
        with client.stream("POST", "/v1/audio/speech", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"POST /v1/audio/speech: {answer.status_code} {answer.read().decode()}")
            for piece in answer.iter_raw():
                first = first or time.monotonic() - begin
                size += file.write(piece)
    seconds = (size - WAV_HEADER_BYTES) / (2 * SAMPLE_RATE)
    console.print(
        f"[bold]{seconds:.2f} s of speech[/bold], the first of it after {first:.2f} s\n  speech         {speech}"
    )


def make_checkpoint(folder: Path, builder: str, *options: str) -> Path:
    """A tiny random checkpoint in the genuine layout, made once by the family's own builder."""
    if not any((folder / name).exists() for name in ("model_index.json", "config.json")):
        with console.status("making a tiny checkpoint with random weights ..."):
            command = [sys.executable, "-m", builder, str(folder), *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    console.print(f"checkpoint: {folder}")
    return folder


@contextmanager
def serve(checkpoint: Path, log: Path, *flags: str) -> Iterator[httpx.Client]:
    """`omni serve` on a free port of this machine; gives a client of it once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    omni = Path(sys.executable).with_name("omni")
    command = [str(omni), "serve", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "tiny", "--disable-uvicorn-access-log", *flags]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(log.parent / "vllm-cache"),
        **os.environ,
    }
    begin = time.monotonic()
    with log.open("wb") as stream, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=env)
        try:
            with console.status("omni serve is starting (vLLM's processes take half a minute to import) ..."):
                wait_until_healthy(client, server, log)
            console.print(f"server: http://127.0.0.1:{port}, up after {time.monotonic() - begin:.0f} s")
            yield client
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_until_healthy(client: httpx.Client, server: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> None:
    """Return once `/health` answers 200; leave the program if the server ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise SystemExit(f"the server did not start; the end of {log}:\n{tail}")


def generate(client: httpx.Client, body: dict[str, object]) -> bytes:
    """Ask for a video as a job, show its progress, and give the file."""
    answer = client.post("/v1/videos", json=body)
    if answer.status_code != 200:
        raise SystemExit(f"POST /v1/videos: {answer.status_code} {answer.text}")
    job = answer.json()
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(job["status"], total=100)
        while job["status"] in ("queued", "in_progress"):
            time.sleep(0.2)
            job = client.get(f"/v1/videos/{job['id']}").json()
            progress.update(task, completed=job["progress"], description=job["status"])
    if job["status"] != "completed":
        raise SystemExit(f"the job failed: {job['error']['message']}")
    return client.get(f"/v1/videos/{job['id']}/content").content


if __name__ == "__main__":
    sys.exit(main())
