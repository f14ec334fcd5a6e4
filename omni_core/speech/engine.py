"""The front end of a served speech model: validation, admission, stages, sound. Knows nothing of vLLM.

    request --> [ reference encoder ] --> talker --frames of codes--> decoder --> sound, as it is made

HTTP and the Python API both go through ``SpeechEngine``, so that a request means the same in both.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_core.ar.messages import MAX_SEED, Frames, TalkerJob
from omni_core.errors import GenerationError, QueueFull, RequestError
from omni_core.requests import parse_request
from omni_core.runtime import RequestRecord, Slot
from omni_core.speech.contract import SpeechModel, Utterance
from omni_core.speech.requests import SpeechRequest

CHUNKS = (1, 2, 4, 8, 16)
"""Frames that the decoder takes at a time: at first few, so that sound comes early, later more, which costs less."""

SHARE = 0.5
"""How much of the sound that the client has left may be played while the next chunk's frames are made."""


class TalkerStage(Protocol):
    """What the front end needs of the talker's stage."""

    stage: str

    @property
    def max_running(self) -> int: ...

    def generate(self, job: TalkerJob, request_id: str) -> AsyncIterator[Frames]: ...

    def check_available(self) -> None: ...


class Session(Protocol):
    """One request in a module stage."""

    async def push(self, values: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class SessionStage(Protocol):
    """What the front end needs of a module stage."""

    stage: str

    def open(self, options: Mapping[str, Any] | None = None, request_id: str | None = None) -> Session: ...

    def check_available(self) -> None: ...


@dataclass(frozen=True)
class Sound:
    """A piece of a request's sound.

    Attributes:
        samples: float32 [samples], mono, in [-1, 1].
        finish_reason: ``None`` while there is more to come, else ``stop`` or ``length``.
        text_tokens: tokens of the text, known from the beginning.
        frames: frames of codes made so far.
    """

    samples: npt.NDArray[np.float32]
    finish_reason: str | None = None
    text_tokens: int = 0
    frames: int = 0


@dataclass(frozen=True)
class SpeechOutput:
    """All of a request's sound.

    Attributes:
        samples: float32 [samples], mono, in [-1, 1].
        sample_rate: Hz.
        finish_reason: ``stop``, or ``length`` where ``max_new_tokens`` or the context ended it.
        request: the request as it was run, with its seed.
        request_id: the id under which it ran.
    """

    samples: npt.NDArray[np.float32]
    sample_rate: int
    finish_reason: str
    request: SpeechRequest
    request_id: str

    @property
    def seconds(self) -> float:
        """How long it sounds."""
        return len(self.samples) / self.sample_rate


def new_request_id() -> str:
    """An id that no other request has."""
    return f"speech-{uuid.uuid4().hex}"


class _Pace:
    """How large the next chunk is to be: as large as it can be made while the client still has sound to play.

    Args:
        frame_seconds: how long a frame sounds.
    """

    def __init__(self, frame_seconds: float) -> None:
        self._frame_seconds = frame_seconds
        self._chunks = self._frames = 0
        self._begin = 0.0

    def sent(self, frames: int) -> None:
        """Take note of a chunk that is on its way to the client."""
        if not self._chunks:
            self._begin = time.perf_counter()
        self._chunks += 1
        self._frames += frames

    def wanted(self, seconds: float) -> int:
        """Frames of the next chunk, where making one takes ``seconds``.

        Where that is longer than it sounds, the client must wait whatever is done, and chunks grow by their number.
        """
        if not self._chunks:
            return CHUNKS[0]
        if seconds >= self._frame_seconds:
            return CHUNKS[min(self._chunks, len(CHUNKS) - 1)]
        left = self._frames * self._frame_seconds - (time.perf_counter() - self._begin)
        return _chunk(int(SHARE * left / seconds))


def _chunk(frames: int) -> int:
    """The largest chunk of no more than ``frames``, of one frame at least."""
    return max((size for size in CHUNKS if size <= frames), default=CHUNKS[0])


class SpeechEngine:
    """A served speech model.

    Args:
        model: the family's half for the checkpoint.
        request_model: its request class.
        talker: makes codes.
        decoder: makes sound of them.
        encoder: makes codes and embeddings of reference sound, or ``None`` where the checkpoint takes none.
        max_queued: how many requests may wait beyond those that the talker runs at once.
    """

    def __init__(
        self,
        model: SpeechModel[Any],
        request_model: type[SpeechRequest],
        talker: TalkerStage,
        decoder: SessionStage,
        encoder: SessionStage | None,
        max_queued: int,
    ) -> None:
        self.model, self.request_model = model, request_model
        self.talker, self.decoder, self.encoder = talker, decoder, encoder
        self.max_queued = max_queued
        self._frame_seconds = model.samples_per_frame / model.sample_rate
        self.active = self.running = 0
        self.ended: Counter[str] = Counter(done=0, error=0, cancelled=0)
        self.on_end: Callable[[RequestRecord], None] = lambda record: None

    def parse(self, values: Mapping[str, Any], *, strict: bool = True) -> SpeechRequest:
        """Validate ``values``, draw a seed where there is none, and check what the checkpoint can do.

        Raises:
            RequestError: with the field at fault.
        """
        request = parse_request(self.request_model, values, strict=strict)
        if request.seed is None:
            request = request.model_copy(update={"seed": secrets.randbelow(MAX_SEED)})
        if request.reference is not None and self.encoder is None:
            raise RequestError("this model takes no reference sound", "ref_audio")
        self.model.check(request)
        return request

    @property
    def capacity(self) -> int:
        """How many requests may be running and waiting."""
        return self.talker.max_running + self.max_queued

    def admit(self) -> Slot:
        """Take a place for one request. Raises ``QueueFull`` or ``StageUnavailable``."""
        for stage in self.stages():
            stage.check_available()
        if self.active >= self.capacity:
            raise QueueFull(f"{self.active} requests are running or waiting, the most that this server takes")
        return Slot(self)

    def stages(self) -> Sequence[TalkerStage | SessionStage]:
        """All of them."""
        return [self.talker, self.decoder, *([] if self.encoder is None else [self.encoder])]

    async def encode_reference(
        self, samples: npt.NDArray[np.float32], options: Mapping[str, Any], request_id: str | None = None
    ) -> Mapping[str, Any]:
        """What the reference encoder makes of sound, float32 [samples] at the model's rate, mono."""
        if self.encoder is None:
            raise RequestError("this model takes no reference sound", "ref_audio")
        session = self.encoder.open(options, request_id)
        try:
            return await session.push({"audio": np.asarray(samples, np.float32)})
        finally:
            session.close()

    async def generate(
        self, request: SpeechRequest, *, slot: Slot | None = None, request_id: str | None = None
    ) -> AsyncIterator[Sound]:
        """The sound of a request, while it is made. Closing the iterator, or cancelling its task, aborts the work.

        ``slot`` is the request's place where the caller has taken one; it is released here.

        Raises:
            QueueFull: the bound on waiting requests is reached.
            GenerationError: the request failed; names the stage.
            GenerationCancelled: the engine dropped the request.
        """
        slot = slot or self.admit()
        request_id = request_id or new_request_id()
        outcome, seconds, begin = "error", dict[str, float](), time.perf_counter()
        self.running += 1
        try:
            utterance = await self._utterance(request, request_id)
            seconds["encode"] = time.perf_counter() - begin
            async with aclosing(self._sound(utterance, request_id)) as sounds:  # type: ignore[type-var]
                async for sound in sounds:
                    seconds.setdefault("first_sound", time.perf_counter() - begin)
                    if sound.finish_reason is not None:
                        outcome = "done"
                    yield sound
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "done" if outcome == "done" else "cancelled"
            raise
        finally:
            self.running -= 1
            slot.release()
            self.ended[outcome] += 1
            self.on_end(RequestRecord(outcome, {**seconds, "whole": time.perf_counter() - begin}))

    async def whole(self, request: SpeechRequest) -> SpeechOutput:
        """All the sound of a request. Raises as ``generate`` does, ``GenerationError`` also where there is no sound."""
        request_id, parts, reason = new_request_id(), list[npt.NDArray[np.float32]](), None
        async with aclosing(self.generate(request, request_id=request_id)) as sounds:  # type: ignore[type-var]
            async for sound in sounds:
                parts.append(sound.samples)
                reason = sound.finish_reason
        samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        if not len(samples) or reason is None:
            raise GenerationError(f"request {request_id}: the model made no sound")
        return SpeechOutput(samples, self.model.sample_rate, reason, request, request_id)

    async def _utterance(self, request: SpeechRequest, request_id: str) -> Utterance:
        options = self.model.reference_options(request)
        if request.stored_voice is not None or options is None:
            return self.model.utterance(request, request.stored_voice)
        assert request.reference is not None
        return self.model.utterance(request, await self.encode_reference(request.reference, options, request_id))

    async def _sound(self, utterance: Utterance, request_id: str) -> AsyncIterator[Sound]:
        """Decode frames while further ones are made."""
        async with AsyncExitStack() as stack:
            session = self.decoder.open(request_id=request_id)
            stack.callback(session.close)
            if utterance.before is not None:
                await session.push({"codes": utterance.before, "silent": True})
            frames = await stack.enter_async_context(
                aclosing(self.talker.generate(utterance.job, request_id))  # type: ignore[type-var]
            )
            feed, pace, made = _Feed(frames), _Pace(self._frame_seconds), 0
            stack.push_async_callback(feed.close)
            while await feed.reach(pace.wanted(feed.seconds)):
                codes = feed.take(_chunk(len(feed)))
                output = await session.push({"codes": codes})
                made += len(codes)
                last = feed.done and not len(feed)
                pace.sent(len(codes))
                yield Sound(output["audio"], feed.reason if last else None, utterance.text_tokens, made)
                if last:
                    return
            yield Sound(np.zeros(0, np.float32), feed.reason, utterance.text_tokens, made)


class _Feed:
    """Reads frames in a task of its own, so that the talker is read while the decoder works.

    Attributes:
        done: whether there are no more frames than have been read.
        reason: why, once there are not.
        seconds: how long a frame has taken, with the wait for the first in it. Over all of them, since two arrivals
            in turn say nothing where this process was kept from reading.
    """

    def __init__(self, frames: AsyncIterator[Frames]) -> None:
        self.done, self.reason, self.seconds = False, "stop", 0.0
        self._read: list[npt.NDArray[np.int32]] = []
        self._count = self._wanted = 0
        self._error: Exception | None = None
        self._reached = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._follow(frames))

    async def _follow(self, frames: AsyncIterator[Frames]) -> None:
        begin, read = time.perf_counter(), 0
        try:
            async for some in frames:
                self._read.append(some.codes)
                self._count += len(some.codes)
                read += len(some.codes)
                self.seconds = (time.perf_counter() - begin) / max(1, read)
                if some.finish_reason is not None:
                    self.done, self.reason = True, some.finish_reason
                if self.done or self._count >= self._wanted:
                    self._reached.set()
            self.done = True
        except Exception as error:
            self._error = error
        self._reached.set()

    def __len__(self) -> int:
        """Frames that can be taken."""
        return self._count

    async def reach(self, count: int) -> bool:
        """Wait for ``count`` frames, or for the last. Returns whether there are any; raises what the talker raised."""
        while self._count < count and not self.done and self._error is None:
            self._wanted = count
            self._reached.clear()
            await self._reached.wait()
        if self._count < count and self._error is not None:
            raise self._error
        return self._count > 0

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """The next ``count`` frames, int32 [count, groups]."""
        joined = np.concatenate(self._read) if len(self._read) > 1 else self._read[0]
        self._read = [joined[count:]] if count < len(joined) else []
        self._count -= count
        return joined[:count]

    async def close(self) -> None:
        """Stop reading."""
        self._task.cancel()
        await asyncio.wait([self._task])
