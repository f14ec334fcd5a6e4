#!/usr/bin/env python3
"""What the processor does for a frame of streamed speech, from the engine's socket to the client's: no model computes.

    python benchmarks/speech_host.py --streams 64 --step-ms 40

The API process is the real one: uvicorn, the endpoint, ``SpeechEngine``, ``TalkerEngine`` and vLLM's ``AsyncLLM`` with
its sockets and its output processor. What it talks to is made up, each in a process of its own: an engine core that
answers every request with a random frame each step, a decoder that answers with noise, clients that read. The figure
is the processor time of the API process for a frame of one stream; it means little on a machine that does other work.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, table

from omni_core.module.contract import ModuleContext, StageModule

SAMPLES = 1920
"""Of a frame."""


class QuietDecoder(StageModule[None]):
    """A decoder whose sound is noise, made once."""

    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 64 * SAMPLES).astype(np.float32)

    @classmethod
    def load(cls, context: ModuleContext) -> QuietDecoder:
        """Nothing is read."""
        return cls()

    def open(self, options: Mapping[str, Any]) -> None:
        """No state."""

    def batch_key(self, state: None, values: Mapping[str, Any]) -> int:
        """As the real decoder's: the number of frames."""
        return len(values["codes"])

    def step(self, states: Sequence[None], inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As much sound as the frames have."""
        return [{"audio": self.noise[: len(values["codes"]) * SAMPLES]} for values in inputs]


# The engine core


def engine_core(
    input_address: str, output_address: str, step_seconds: float, groups: int, end_code: int, spent: Any
) -> None:
    """Answers as ``EngineCoreProc`` does, with random codes, until each request has its ``max_tokens``."""
    import zmq
    from vllm.v1.engine import (
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        EngineCoreRequestType,
        FinishReason,
        UtilityOutput,
    )
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    context = zmq.Context()
    requests, outputs = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    requests.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
    requests.set_hwm(0)
    outputs.set_hwm(0)
    requests.connect(input_address)
    outputs.connect(output_address)
    requests.send(b"")
    decoder, generic, encoder = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder(), MsgpackEncoder()
    running: dict[str, list[int]] = {}
    pool = np.random.default_rng(0).integers(0, end_code, (4096, groups)).astype(np.int32) + (
        np.arange(groups, dtype=np.int32) << 15
    )
    steps = 0
    due = time.perf_counter()
    while True:
        while requests.poll(0 if running else None):
            kind, *data = requests.recv_multipart(copy=False)
            kind = EngineCoreRequestType(bytes(kind.buffer))
            if kind == EngineCoreRequestType.ADD:
                request = decoder.decode(data)
                running[request.request_id] = [0, request.sampling_params.max_tokens]
            elif kind == EngineCoreRequestType.ABORT:
                for name in generic.decode(data):
                    running.pop(name, None)
            else:  # which kinds of task there are
                called = UtilityOutput(generic.decode(data)[1], result=UtilityResult(["generate"]))
                outputs.send_multipart(encoder.encode(EngineCoreOutputs(utility_output=called)))
            due = max(due, time.perf_counter())
        if not (count := len(running)):
            continue
        first = steps * 61 % (len(pool) - count)
        begin = time.process_time()
        codes = pool[first : first + count].copy()
        tokens = codes[:, 0].tolist()
        lists = LogprobsLists(codes, np.zeros((count, groups), np.float32), np.zeros(count, np.int32))
        made = []
        for index, (name, progress) in enumerate(list(running.items())):
            progress[0] += 1
            done = progress[0] >= progress[1]
            if done:
                del running[name]
            made.append(
                EngineCoreOutput(
                    request_id=name,
                    new_token_ids=[tokens[index]],
                    new_logprobs=lists.slice_request(index, 1),
                    finish_reason=FinishReason.LENGTH if done else None,
                )
            )
        outputs.send_multipart(encoder.encode(EngineCoreOutputs(outputs=made)), copy=False)
        spent.value += time.process_time() - begin
        steps += 1
        due += step_seconds
        time.sleep(max(0.0, due - time.perf_counter()))


# The clients


def clients(port: int, streams: int, frames: int, rounds: int, results: Any) -> None:
    """Read ``streams`` answers at once, ``rounds`` times over; puts what was seen of each round."""
    body = {"input": "On and on.", "voice": "ryan", "seed": 1, "stream": True, "response_format": "pcm"}
    data = json.dumps({**body, "max_new_tokens": frames}).encode()
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"

    async def one() -> tuple[float, float, int, int]:
        begin = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + data)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in answer, answer + await reader.read(1000)
        first, late, total, pieces, start = 0.0, 0.0, 0, 0, 0.0
        while size := int(await reader.readline(), 16):
            now = time.perf_counter()
            if not total:
                first, start = now - begin, now
            late = max(late, now - start - total / 48_000)
            total += len(await reader.readexactly(size + 2)) - 2
            pieces += 1
        writer.close()
        assert total == 2 * SAMPLES * frames, (total, 2 * SAMPLES * frames)
        return first, late, pieces, total

    async def work() -> list[Any]:
        return await asyncio.gather(*(one() for _ in range(streams)))

    for _ in range(rounds):
        begin = time.perf_counter()
        try:
            seen = asyncio.run(work())
        except BaseException as error:
            results.put(("round", repr(error), []))
            raise
        results.put(("round", time.perf_counter() - begin, seen))


# The API process


def start(folder: Path, arguments: argparse.Namespace, stack: ExitStack) -> Any:
    """The service of a checkpoint whose talker and decoder are made up."""
    from omni_core.config.startup import check_versions

    check_versions(allow_version_mismatch=False)
    from vllm.v1.engine.async_llm import AsyncLLM

    from omni_core.config.model import Resolved
    from omni_core.http.speech import SpeechService
    from omni_core.http.voices import VoiceStore
    from omni_core.module.client import ModuleEngine
    from omni_core.module.process import ModuleSettings
    from omni_core.plugins.declarations import load_reference
    from omni_core.speech.engine import SpeechEngine
    from omni_core.stages import SupervisedModule, SupervisedTalker
    from omni_core.vllm.ar.engine import TalkerEngine
    from omni_core.vllm.arguments import resolve_for_api

    engine = {"max_num_seqs": arguments.streams, "disable_log_stats": not arguments.log_stats}
    resolved: Resolved = resolve_for_api(str(folder), engine=engine)
    model = load_reference(resolved.family.speech)(resolved.checkpoint)
    addresses = {"input_address": f"ipc://{folder}/in", "output_address": f"ipc://{folder}/out"}
    spent = multiprocessing.get_context("spawn").Value("d", 0.0)
    core = multiprocessing.get_context("spawn").Process(
        target=engine_core,
        args=(*addresses.values(), arguments.step_ms / 1000, model.num_code_groups, model.end_code, spent),
        daemon=True,
    )
    core.start()
    stack.callback(core.kill)
    AsyncLLM.from_vllm_config = partial(AsyncLLM.from_vllm_config, client_addresses=addresses)
    talker = SupervisedTalker(lambda: TalkerEngine(resolved, resolved.stage, model))
    stack.callback(talker.close)
    settings = ModuleSettings("decoder", "speech_host:QuietDecoder", str(folder), "cpu", "float32")
    decoder = SupervisedModule(lambda: ModuleEngine(settings))
    stack.callback(decoder.close)
    front = SpeechEngine(model, load_reference(resolved.family.request)(resolved.checkpoint), talker, decoder, None, 64)
    store = VoiceStore(folder, limit=10, checkpoint="made up")
    stack.callback(store.close)

    async def no_fetch(url: str) -> bytes:
        raise ValueError(url)

    return SpeechService(front, store, ["tts"], no_fetch), spent


async def measure(service: Any, core: Any, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Serve, and let the clients read."""
    import uvicorn
    from fastapi import FastAPI

    from omni_core.http.speech import speech_router

    for stage in service.engine.stages():
        stage.watch()
    app = FastAPI()
    app.include_router(speech_router(service))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve([listener]))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    port = listener.getsockname()[1]
    reading = spawn.Process(
        target=clients,
        args=(port, arguments.streams, arguments.frames, arguments.rounds + 1, results),
        daemon=True,
    )
    reading.start()
    figures: dict[str, list[float]] = {name: [] for name in COLUMNS}
    profile = cProfile.Profile(time.process_time) if arguments.profile else None
    before = time.process_time()
    for number in range(arguments.rounds + 1):
        if number == 1 and profile is not None:
            profile.enable()
        made = core.value
        before, switches = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
        _, seconds, seen = await asyncio.to_thread(results.get, timeout=arguments.timeout)
        spent, after = time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF)
        print(f"round {number}: {seconds}", flush=True)
        if isinstance(seconds, str):
            raise SystemExit(seconds)
        if not number:
            continue  # of warming up
        frames = arguments.streams * arguments.frames
        figures["API, us a frame"].append(1e6 * spent / frames)
        figures["core, us a frame"].append(1e6 * (core.value - made) / frames)
        figures["wall, ms a step"].append(1e3 * seconds / arguments.frames)
        figures["first sound, ms"].append(1e3 * statistics.median(first for first, *_ in seen))
        figures["longest stall, ms"].append(1e3 * max(late for _, late, *_ in seen))
        figures["frames a piece"].append(frames / sum(pieces for *_, pieces, _ in seen))
        switched = after.ru_nvcsw + after.ru_nivcsw - switches.ru_nvcsw - switches.ru_nivcsw
        figures["switches a frame"].append(switched / frames)
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.profile)
    server.should_exit = True
    await serving
    return figures


COLUMNS = (
    "API, us a frame", "core, us a frame", "wall, ms a step", "first sound, ms", "longest stall, ms", "frames a piece",
    "switches a frame",
)  # fmt: skip


def main() -> None:
    """Measure, print and, if asked, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--streams", type=int, default=64, help="at once")
    add("--frames", type=int, default=200, help="of a stream")
    add("--step-ms", type=float, default=40, help="time between two frames of a stream")
    add("--timeout", type=float, default=30, help="seconds that a round may take")
    add("--rounds", type=int, default=3)
    add("--log-stats", action="store_true", help="with vLLM's own statistics, as by default")
    add("--profile", type=int, default=0, metavar="LINES", help="print a profile of the event loop's thread")
    add("--record", action="store_true", help="append the run to docs/performance.md")
    arguments = parser.parse_args()
    import uvloop

    from omni_plugin_qwen3_tts.checkpoints import write_checkpoint

    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the decoder's process
    with tempfile.TemporaryDirectory(prefix="omni-host-") as text, ExitStack() as stack:
        folder = write_checkpoint(Path(text) / "checkpoint", kind="custom-voice")
        service, core = start(folder, arguments, stack)
        figures = uvloop.run(measure(service, core, arguments))
    row = [str(arguments.streams), f"{arguments.step_ms:g}"]
    row += [f"{statistics.median(values):.2f}" for values in figures.values()]
    text = table(("streams", "step, ms", *COLUMNS), [row])
    title = "Processor time of streamed speech in the API process"
    finish(title, text, figures, "the column's unit", record=arguments.record)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
