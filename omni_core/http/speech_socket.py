"""``/v1/audio/speech/stream``: a WebSocket that takes text bit by bit and answers each flush with speech.

One task reads what the client sends, another speaks the utterances in turn, so that a client that leaves is noticed at
once, and text of the next utterance is taken while one is spoken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from omni_core.errors import OmniError, RequestError
from omni_core.http.bodies import read_object
from omni_core.http.errors import HttpError, error_body
from omni_core.http.speech_answers import SEND_SECONDS, Making
from omni_core.http.speech_bodies import MAX_SPEECH_BODY_BYTES, SocketEncoding, Wanted
from omni_core.speech.engine import SpeechEngine

logger = logging.getLogger(__name__)

MAX_TEXT = 20_000
"""Characters of an utterance."""

MAX_WAITING = 16
"""Utterances that may wait while one is spoken."""

IDLE_SECONDS = 60.0
"""How long a client may send nothing while nothing is spoken."""

NORMAL, POLICY, TOO_BIG, FAILED = 1000, 1008, 1009, 1011

Read = Callable[[Mapping[str, Any]], Awaitable[Wanted]]
"""From the fields of a request, text included, to what is wanted."""


@dataclass(frozen=True)
class _Utterance:
    index: int
    text: str
    config: _Config


@dataclass(frozen=True)
class _Config:
    """What ``session.config`` asked for; ``seeded`` is whether that was a seed, too."""

    wanted: Wanted
    seeded: bool


class _Closed(Exception):
    """The connection is to be closed by us."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class SpeechSocket:
    """One connection.

    Args:
        socket: accepted already.
        engine: what generates.
        read: checks a request.
        idle_seconds: see ``IDLE_SECONDS``.
    """

    def __init__(
        self, socket: WebSocket, engine: SpeechEngine, read: Read, *, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._socket, self._engine, self._read, self._idle_seconds = socket, engine, read, idle_seconds
        self._config: _Config | None = None
        self._text: list[str] = []
        self._count = 0
        self._waiting: asyncio.Queue[_Utterance | None] = asyncio.Queue()
        self._speaking = False
        self._last = time.monotonic()

    async def run(self) -> None:
        """Talk until either side ends it. When the client leaves, what is under way is cancelled."""
        speaker = asyncio.create_task(self._speak())
        reader = asyncio.create_task(self._take_messages())
        code, reason = NORMAL, ""
        try:
            await asyncio.wait([speaker, reader], return_when=asyncio.FIRST_COMPLETED)
            for task in (speaker, reader):
                if task.done():
                    task.result()
        except _Closed as closed:
            code, reason = closed.code, closed.reason
        except (WebSocketDisconnect, OSError):
            return  # the client left
        except Exception:
            logger.exception("a speech session failed")
            code, reason = FAILED, "the session failed"
        finally:
            for task in (speaker, reader):
                task.cancel()
            await asyncio.wait([speaker, reader])
        try:
            if reason:
                await self._error(RequestError(reason))
            await self._socket.close(code, reason)
        except (WebSocketDisconnect, OSError, RuntimeError):
            return

    async def _take_messages(self) -> None:
        """Read until the client leaves. After ``session.close`` what waits is still spoken, but nothing more counts."""
        while True:
            text = await self._next_text()
            try:
                message = read_object(text, "the message") if text is not None else {}
                kind = message.pop("type", None)
                if kind == "session.close":
                    self._waiting.put_nowait(None)
                    while True:
                        await self._next_text()
                await self._take(kind, message)
            except (OmniError, HttpError) as error:
                await self._error(error)

    async def _next_text(self) -> str | None:
        while True:
            left = self._last + self._idle_seconds - time.monotonic()
            busy = self._speaking or not self._waiting.empty()
            if left <= 0 and not busy:
                raise _Closed(POLICY, f"nothing was sent for {self._idle_seconds:g} seconds")
            try:
                message = await asyncio.wait_for(self._socket.receive(), self._idle_seconds if busy else left)
                break
            except TimeoutError:
                continue
        self._last = time.monotonic()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        text: str | None = message.get("text")
        if len(text or message.get("bytes") or "") > MAX_SPEECH_BODY_BYTES:
            raise _Closed(TOO_BIG, f"a message may have {MAX_SPEECH_BODY_BYTES} characters")
        return text

    async def _take(self, kind: Any, message: dict[str, Any]) -> None:
        """Do what a message says. Raises ``RequestError`` or ``HttpError`` for one that is wrong."""
        if kind == "session.config":
            if self._text:
                raise RequestError("session.config: there is text that was not flushed; send input.done first", "type")
            if "input" in message:
                raise RequestError("input: text comes with input.text", "input")
            wanted = await self._read({**message, "input": "-"})
            self._config = _Config(wanted, message.get("seed") is not None)
            return
        if kind not in ("input.text", "input.done"):
            known = "session.config, input.text, input.done and session.close"
            raise RequestError(f"type={kind!r:.80}: messages are JSON objects of type {known}", "type")
        if self._config is None:
            raise RequestError(f"{kind}: send session.config first", "type")
        if unknown := set(message) - ({"text"} if kind == "input.text" else set()):
            raise RequestError(f"{kind} has no {min(unknown)!r:.80}", min(unknown)[:80])
        if kind == "input.text":
            self._add(message.get("text"))
        else:
            self._flush(self._config)

    def _add(self, text: Any) -> None:
        if not isinstance(text, str):
            raise RequestError("text must be a string", "text")
        if (size := sum(map(len, self._text)) + len(text)) > MAX_TEXT:
            raise RequestError(f"text: {size} characters wait; an utterance may have {MAX_TEXT}", "text")
        if text:
            self._text.append(text)

    def _flush(self, config: _Config) -> None:
        if self._waiting.qsize() >= MAX_WAITING:
            raise RequestError(f"input.done: {MAX_WAITING} utterances wait already", "type")
        self._waiting.put_nowait(_Utterance(self._count, "".join(self._text), config))
        self._count += 1
        self._text = []

    async def _speak(self) -> None:
        """Speak the utterances in turn, until the last."""
        while (utterance := await self._waiting.get()) is not None:
            self._speaking = True
            spoken = bool(utterance.text.strip())
            if spoken:
                await self._utter(utterance)
            await self._event("session.done", utterance_index=utterance.index, total_sentences=1 if spoken else 0)
            self._speaking, self._last = False, time.monotonic()

    async def _utter(self, utterance: _Utterance) -> None:
        """``audio.start``, sound and ``audio.done``, with an error before the last where there is one."""
        names = {"utterance_index": utterance.index, "sentence_index": 0}
        encoding = utterance.config.wanted.encoding
        assert isinstance(encoding, SocketEncoding)
        sent, failed, started, usage, making = 0, False, False, {}, None
        try:
            request = self._again(utterance)
            making = Making(self._engine, Wanted(request, encoding), streamed=encoding.stream_audio)
            await self._event(
                "audio.start",
                **names,
                sentence_text=utterance.text,
                format=encoding.response_format,
                sample_rate=making.sample_rate,
            )
            started = True
            async with aclosing(making.pieces()) as pieces:
                async for piece in pieces:
                    async with asyncio.timeout(SEND_SECONDS):
                        await self._socket.send_bytes(piece)
                    sent += len(piece)
            usage = {"usage": making.usage(), "finish_reason": making.finish_reason}
        except (WebSocketDisconnect, OSError, TimeoutError):
            raise
        except Exception as error:
            if not isinstance(error, OmniError):
                logger.exception("utterance %d failed", utterance.index)
            failed = True
            await self._error(error, utterance_index=utterance.index)
        finally:
            if making is not None:
                making.release()
        if started:
            await self._event("audio.done", **names, total_bytes=sent, error=failed, **usage)

    def _again(self, utterance: _Utterance) -> Any:
        """The request of ``session.config`` with the text of an utterance, checked as a whole."""
        request = utterance.config.wanted.request
        values = {name: getattr(request, name) for name in request.model_fields_set}
        if not utterance.config.seeded:
            del values["seed"]
        return self._engine.parse({**values, "input": utterance.text})

    async def _error(self, error: Exception, **names: Any) -> None:
        await self._event("error", error=error_body(error), **names)

    async def _event(self, kind: str, **values: Any) -> None:
        await asyncio.wait_for(self._socket.send_json({"type": kind, **values}), SEND_SECONDS)
