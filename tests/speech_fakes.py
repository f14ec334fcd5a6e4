"""A speech model without a network: each voice is a sine of its own pitch, as slow or faulty as a request wants."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import Field

from omni_core.ar.messages import Frames, TalkerJob
from omni_core.errors import EngineDied, RequestError, StageUnavailable
from omni_core.http.declared import describe
from omni_core.http.speech import SpeechService, speech_router
from omni_core.http.voices import VoiceStore
from omni_core.speech.contract import SpeechModel, Utterance
from omni_core.speech.engine import SpeechEngine
from omni_core.speech.requests import SpeechRequest

RATE, SAMPLES = 24_000, 480
PITCHES = {"ann": 200, "bob": 300, "carol": 450}
CLONED = 700


class FakeRequest(SpeechRequest):
    task_type: Literal["CustomVoice", "Base"] | None = Field(default=None, description="What kind of speech.")
    x_vector_only_mode: bool = Field(default=False, description="Take only the speaker from the reference.")
    frames: int = Field(default=40, ge=0, le=4000, description="How many frames it takes to say it.")
    frame_seconds: float = Field(default=0.0, ge=0, le=1, description="How long each takes.")
    fail_at: int | None = Field(default=None, ge=0, description="The frame at which the talker fails.")


class FakeModel(SpeechModel[FakeRequest]):
    sample_rate, samples_per_frame, num_code_groups, end_code, stand_in = RATE, SAMPLES, 2, 9999, 0
    voices, reserved_voices = tuple(PITCHES), ("default",)

    @classmethod
    def load(cls, checkpoint: Any) -> FakeModel:
        return cls()

    def check(self, request: FakeRequest) -> None:
        if request.voice is not None and request.voice not in PITCHES:
            raise RequestError(f"voice={request.voice!r}: this model has {', '.join(PITCHES)}", "voice")
        if request.reference is not None and not (request.ref_text or request.x_vector_only_mode):
            raise RequestError("ref_text is required with ref_audio", "ref_text")

    def reference_options(self, request: FakeRequest) -> Any:
        return None if request.reference is None else {"codes": not request.x_vector_only_mode}

    def voice_options(self, ref_text: str | None) -> Any:
        return {"codes": ref_text is not None}

    def utterance(self, request: FakeRequest, reference: Any) -> Utterance:
        pitch = int(reference["pitch"]) if reference else PITCHES[request.voice or "ann"]
        prompt = {
            "pitch": pitch, "frames": request.frames, "seconds": request.frame_seconds, "fail_at": request.fail_at,
        }  # fmt: skip
        job = TalkerJob(prompt, 1, max_frames=request.max_new_tokens, seed=request.seed or 0)
        return Utterance(job, text_tokens=len(request.input.split()))


class FakeStage:
    def __init__(self, stage: str) -> None:
        self.stage, self.down = stage, False

    def check_available(self) -> None:
        if self.down:
            raise StageUnavailable(f"stage {self.stage} is restarting")


class FakeTalker(FakeStage):
    def __init__(self, max_running: int) -> None:
        super().__init__("talker")
        self.max_running = max_running
        self.begun = self.left = self.made = 0

    async def generate(self, job: TalkerJob, request_id: str):
        self.begun += 1
        wanted = job.prompt
        count = min(wanted["frames"], job.max_frames)
        reason = "stop" if count == wanted["frames"] else "length"
        try:
            for index in range(count):
                if wanted["fail_at"] == index:
                    raise EngineDied(f"stage talker: its process ended with request {request_id} in it")
                await asyncio.sleep(wanted["seconds"])
                self.made += 1
                codes = np.array([[wanted["pitch"], job.seed % 1000]], np.int32)
                yield Frames(codes, reason if index == count - 1 else None)
            if not count:
                yield Frames(np.zeros((0, 2), np.int32), reason)
        finally:
            self.left += 1


class DecoderSession:
    def __init__(self) -> None:
        self.position = 0

    async def push(self, values: Any) -> Any:
        codes = values["codes"]
        pitch, seed = np.repeat(codes, SAMPLES, axis=0).T if len(codes) else np.zeros((2, 0))
        time_ = (self.position + np.arange(len(pitch))) / RATE
        self.position += len(pitch)
        return {"audio": (0.4 * np.sin(2 * np.pi * pitch * time_) + 1e-4 * seed).astype(np.float32)}

    def close(self) -> None:
        pass


class FakeDecoder(FakeStage):
    def open(self, options: Any = None, request_id: str | None = None) -> DecoderSession:
        return DecoderSession()


class FakeEncoder(FakeStage):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__("encoder")
        self.seen: list[tuple[int, Any]] = []

    def open(self, options: Any = None, request_id: str | None = None) -> FakeEncoder:
        self._options = options
        return self

    async def push(self, values: Any) -> Any:
        self.seen.append((len(values["audio"]), dict(self._options)))
        return {"pitch": np.array(CLONED), "codes": np.zeros((3, 2), np.int32), "kind": "cloned"}

    def close(self) -> None:
        pass


class SpeechServer:
    """A real server in a thread: ``url``, the service, and the stages behind it."""

    def __init__(
        self,
        folder: Any,
        *,
        model: SpeechModel[Any] | None = None,
        request_model: type[SpeechRequest] = FakeRequest,
        max_running=4,
        max_queued=60,
        limit=1000,
        fetch=None,
        **options: Any,
    ) -> None:
        async def no_fetch(url: str) -> bytes:
            raise RequestError(f"cannot load {url}: nothing is fetched here")

        self.talker, self.decoder, self.encoder = FakeTalker(max_running), FakeDecoder("decoder"), FakeEncoder()
        stages = self.talker, self.decoder, self.encoder
        engine = SpeechEngine(model or FakeModel(), request_model, *stages, max_queued)
        self.engine, self.store = engine, VoiceStore(folder, limit=limit, checkpoint="fake")
        self.service = SpeechService(engine, self.store, ["fake", "tts-1"], fetch or no_fetch, **options)
        app = FastAPI()
        app.include_router(speech_router(self.service))
        describe(app)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        try:
            yield self
        finally:
            self.server.should_exit = True
            thread.join(20)
            self.store.close()
