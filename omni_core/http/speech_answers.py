"""Answers made of speech: the file while it is made, events with pieces of it, or the whole."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from omni_core.audio import FORMATS, Samples
from omni_core.errors import GenerationError, OmniError
from omni_core.http.clients import until_client_leaves
from omni_core.http.errors import error_body
from omni_core.http.speech_bodies import Wanted
from omni_core.speech.engine import Sound, SpeechEngine, new_request_id

logger = logging.getLogger(__name__)

SEND_SECONDS = 60.0
"""How long a client may take nothing of what is sent before it counts as gone."""

EVENTS = "text/event-stream"


class Making:
    """The file of one request, while it is made.

    Args:
        engine: what generates.
        wanted: the request. It takes a place, which is given back when the work ends, or with ``release``.
        streamed: whether bytes are wanted as soon as they are known.

    Raises:
        QueueFull: there is no place.
        StageUnavailable: a stage is down.
    """

    def __init__(self, engine: SpeechEngine, wanted: Wanted, *, streamed: bool) -> None:
        self.request_id = new_request_id()
        self.wanted, self._engine = wanted, engine
        self._encoder = wanted.encoding.encoder(engine.model.sample_rate, streamed=streamed)
        self._slot = engine.admit()
        self.sample_rate = self._encoder.sample_rate
        self.last: Sound | None = None

    @property
    def media_type(self) -> str:
        """Of the file."""
        return FORMATS[self.wanted.encoding.response_format].media_type

    def headers(self) -> dict[str, str]:
        """What is known before there is any sound."""
        return {
            "X-Request-Id": self.request_id,
            "X-Seed": str(self.wanted.request.seed),
            "X-Sample-Rate": str(self.sample_rate),
        }

    def usage(self) -> dict[str, int]:
        """Tokens of text in, frames of speech out."""
        tokens, frames = (0, 0) if self.last is None else (self.last.text_tokens, self.last.frames)
        return {"input_tokens": tokens, "output_tokens": frames, "total_tokens": tokens + frames}

    @property
    def finish_reason(self) -> str | None:
        """``stop`` or ``length``, once all is made."""
        return None if self.last is None else self.last.finish_reason

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The bytes of the file, none of them empty. Closing the generator aborts the work.

        Raises:
            GenerationError: the work failed, or made no sound.
        """
        samples = 0
        try:
            sounds = self._engine.generate(self.wanted.request, slot=self._slot, request_id=self.request_id)
            async with aclosing(sounds):  # type: ignore[type-var]
                async for sound in sounds:
                    self.last = sound
                    samples += len(sound.samples)
                    if piece := await self._encode(sound.samples):
                        yield piece
            if not samples or self.finish_reason is None:
                raise GenerationError(f"request {self.request_id}: the model made no sound")
            if piece := await asyncio.to_thread(self._encoder.finish):
                yield piece
        finally:
            self.release()

    async def _encode(self, samples: Samples) -> bytes:
        """The bytes that ``samples`` complete. A thread costs more than plain samples do, and less than a codec."""
        if self._encoder.plain:
            return self._encoder.encode(samples)
        return await asyncio.to_thread(self._encoder.encode, samples)

    def release(self) -> None:
        """Give the place back, where the work has not begun."""
        self._slot.release()

    async def whole(self) -> bytes:
        """The whole file. Raises as ``pieces`` does."""
        return b"".join([piece async for piece in self.pieces()])


class StreamAnswer(Response):
    """An answer that is sent while it is made.

    If making fails once something has been sent, the connection is broken off, so that no client takes the part for the
    whole; if the client leaves, making is cancelled.
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def sending(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):  # wait_for would swallow a cancellation once it is sent
                    await send(message)
            except TimeoutError:
                raise OSError(f"the client took nothing for {SEND_SECONDS:g} seconds") from None

        async def work() -> None:
            async with aclosing(self._pieces):
                await sending({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for piece in self._pieces:
                    await sending({"type": "http.response.body", "body": piece, "more_body": True})
            await sending({"type": "http.response.body", "body": b""})

        try:
            await until_client_leaves(receive, work())
        except ClientDisconnect:
            return
        finally:
            await self._pieces.aclose()  # where sending had not begun


async def stream_answer(making: Making, receive: Receive, *, events: bool) -> StreamAnswer:
    """An answer with the file of ``making``, whose first bytes are there: what fails before them is raised here.

    Raises:
        OmniError: the work failed before there was anything to send.
        ClientDisconnect: the client left before.
    """
    pieces = making.pieces()
    try:
        first = await until_client_leaves(receive, anext(pieces))
    except BaseException:
        await pieces.aclose()
        making.release()
        raise
    following = _with_first(first, pieces)
    if events:
        return StreamAnswer(_events(making, following), EVENTS, {**making.headers(), "Cache-Control": "no-cache"})
    return StreamAnswer(following, making.media_type, making.headers())


async def _with_first(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        yield first
        async for piece in pieces:
            yield piece


async def _events(making: Making, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """OpenAI's events; an error is the last of them where making fails."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
    except Exception as error:
        if not isinstance(error, OmniError):
            logger.exception("request %s failed", making.request_id)
        yield _event({"type": "error", "error": error_body(error)})
        return
    done = {"type": "speech.audio.done", "usage": making.usage(), "finish_reason": making.finish_reason}
    yield _event(done)


def _event(values: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(values)}\n\n".encode()


async def whole_answer(making: Making, receive: Receive) -> Response:
    """An answer with the whole file. Raises as ``stream_answer`` does."""
    try:
        data = await until_client_leaves(receive, making.whole())
    finally:
        making.release()
    usage = {f"X-{name.replace('_', '-').title()}": str(count) for name, count in making.usage().items()}
    headers = {**making.headers(), **usage, "X-Finish-Reason": str(making.finish_reason)}
    return Response(data, media_type=making.media_type, headers=headers)


async def batch_item(making: Making, index: int) -> dict[str, Any]:
    """The result of one item of a batch; an error is one, too."""
    try:
        data = await making.whole()
    except Exception as error:
        if not isinstance(error, OmniError):
            logger.exception("request %s failed", making.request_id)
        return failed_item(index, error)
    return {
        "index": index,
        "status": "success",
        "audio_data": base64.b64encode(data).decode(),
        "media_type": making.media_type,
        "sample_rate": making.sample_rate,
        "seed": making.wanted.request.seed,
        "finish_reason": making.finish_reason,
        "usage": making.usage(),
    }


def failed_item(index: int, error: Exception) -> dict[str, Any]:
    """The result of an item of a batch that failed or was refused."""
    return {"index": index, "status": "error", "error": error_body(error)}
