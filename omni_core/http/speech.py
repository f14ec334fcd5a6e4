"""``/v1/audio/speech`` and what belongs to it: batches, uploaded voices, and a WebSocket that takes text bit by bit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import JSONResponse, Response

from omni_core.errors import OmniError, RequestError
from omni_core.http.bodies import read_body
from omni_core.http.clients import until_client_leaves
from omni_core.http.declared import answers
from omni_core.http.errors import HttpError, Route
from omni_core.http.speech_answers import Making, batch_item, failed_item, stream_answer, whole_answer
from omni_core.http.speech_bodies import (
    MAX_BATCH_BODY_BYTES,
    MAX_SPEECH_BODY_BYTES,
    Delivery,
    Encoding,
    FetchSound,
    SocketEncoding,
    SpeechReader,
    Wanted,
)
from omni_core.http.speech_declared import (
    BatchAnswer,
    VoiceDeleted,
    VoicesAnswer,
    batch_body,
    sound_answers,
    speech_body,
    voice_body,
)
from omni_core.http.speech_socket import IDLE_SECONDS, SpeechSocket
from omni_core.http.voices import StoredVoice, VoiceStore
from omni_core.speech.engine import SpeechEngine

REFUSED = (400, 404, 413, 429, 500, 503)


class SpeechService:
    """The speech endpoints of one served model.

    Args:
        engine: what generates.
        voices: the uploaded voices.
        models: the names under which the model is served.
        fetch: fetches reference sound by URL.
        max_batch_items: how many items a batch may have.
        idle_seconds: how long the client of a WebSocket may send nothing while nothing is spoken.
    """

    def __init__(
        self,
        engine: SpeechEngine,
        voices: VoiceStore,
        models: list[str],
        fetch: FetchSound,
        *,
        max_batch_items: int = 32,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.engine, self.voices, self.models = engine, voices, models
        self.max_batch_items, self.idle_seconds = max_batch_items, idle_seconds
        self.reader = SpeechReader(engine, voices, models, fetch)

    async def speak(self, request: Request) -> Response:
        """The answer of ``/v1/audio/speech``."""
        fields, typed = await read_body(request, limit=MAX_SPEECH_BODY_BYTES, files=("ref_audio",))
        wanted = await self.reader.read(fields, Delivery, typed=typed)
        assert isinstance(wanted.encoding, Delivery)
        making = Making(self.engine, wanted, streamed=wanted.encoding.stream)
        if not wanted.encoding.stream:
            return await whole_answer(making, request.receive)
        return await stream_answer(making, request.receive, events=wanted.encoding.stream_format == "sse")

    async def batch(self, request: Request) -> Response:
        """The answer of ``/v1/audio/speech/batch``."""
        fields, typed = await read_body(request, limit=MAX_BATCH_BODY_BYTES)
        if not typed:
            raise RequestError("a batch is sent as application/json")
        items = self._items(fields)
        wanted = await until_client_leaves(request.receive, self._read_items(items))
        makings: list[Making | dict[str, Any]] = []
        try:
            for index, item in enumerate(wanted):
                if isinstance(item, Wanted):
                    makings.append(Making(self.engine, item, streamed=False))
                else:
                    makings.append(failed_item(index, item))
            results = await until_client_leaves(request.receive, _make_items(makings))
        finally:
            for making in makings:
                if isinstance(making, Making):
                    making.release()
        succeeded = sum(result["status"] == "success" for result in results)
        counts = {"total": len(results), "succeeded": succeeded, "failed": len(results) - succeeded}
        return JSONResponse({"object": "audio.speech.batch", "results": results, **counts})

    def _items(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The items of a batch, each with the fields of the batch that it does not have itself."""
        shared = {name: value for name, value in fields.items() if name != "items"}
        if "input" in shared:
            raise RequestError("input: each item has its own", "input")
        self.reader.check_names(shared, Encoding, "items")
        items = fields.get("items")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise RequestError("items is required: a list of objects", "items")
        if not 1 <= len(items) <= self.max_batch_items:
            raise RequestError(f"items: {len(items)} of them; allowed: 1 to {self.max_batch_items}", "items")
        if len(items) > self.engine.capacity:
            most = self.engine.capacity
            raise RequestError(f"items: {len(items)} of them; this server takes {most} requests at a time", "items")
        self.reader.check_shared(shared)
        return [{**shared, **item} for item in items]

    async def _read_items(self, items: list[dict[str, Any]]) -> list[Wanted | OmniError | HttpError]:
        async def read(item: Mapping[str, Any]) -> Wanted | OmniError | HttpError:
            try:
                return await self.reader.read(item, Encoding, typed=True)
            except (OmniError, HttpError) as error:
                return error

        return await asyncio.gather(*map(read, items))

    async def add_voice(self, request: Request) -> StoredVoice:
        """Encode an uploaded sample and keep the voice."""
        fields, typed = await read_body(request, limit=MAX_SPEECH_BODY_BYTES, files=("audio_sample",))
        if typed:
            raise RequestError("a voice is sent as multipart/form-data, with audio_sample as a file")
        upload, samples = await self.reader.read_voice(fields)
        options = self.engine.model.voice_options(upload.ref_text)
        slot = self.engine.admit()
        try:
            encoded = await until_client_leaves(request.receive, self.engine.encode_reference(samples, options))
        finally:
            slot.release()
        return self.voices.add(
            upload.name,
            encoded,
            consent=upload.consent,
            ref_text=upload.ref_text,
            speaker_description=upload.speaker_description,
        )

    def delete_voice(self, name: str) -> None:
        """Forget an uploaded voice. Raises ``RequestError`` or ``HttpError`` where there is none of that name."""
        if self.reader.is_built_in(name):
            raise RequestError(f"{name!r} is a voice of the model and stays", "name")
        if self.voices.delete(name) is None:
            raise HttpError(404, f"there is no uploaded voice {name!r:.80}", "name")

    async def talk(self, socket: WebSocket) -> None:
        """A connection to ``/v1/audio/speech/stream``."""
        await socket.accept()
        read = partial(self.reader.read, encoding=SocketEncoding, typed=True)
        await SpeechSocket(socket, self.engine, read, idle_seconds=self.idle_seconds).run()


async def _make_items(makings: list[Making | dict[str, Any]]) -> list[dict[str, Any]]:
    async def made(index: int, making: Making | dict[str, Any]) -> dict[str, Any]:
        return await batch_item(making, index) if isinstance(making, Making) else making

    return await asyncio.gather(*(made(index, making) for index, making in enumerate(makings)))


def speech_router(service: SpeechService) -> APIRouter:
    """The routes of ``service``."""
    router = APIRouter(tags=["speech"], route_class=Route)
    model, models = service.engine.request_model, service.models

    @router.post(
        "/v1/audio/speech",
        openapi_extra=speech_body(model, models),
        response_class=Response,
        responses=sound_answers(*REFUSED),
    )
    async def create_speech(request: Request) -> Response:
        """Say a text: the file, while it is made, or events with pieces of it."""
        return await service.speak(request)

    @router.post(
        "/v1/audio/speech/batch",
        openapi_extra=batch_body(model, models, service.max_batch_items),
        responses=answers(BatchAnswer, 400, 404, 413, 429, 503),
    )
    async def create_speech_batch(request: Request) -> Response:
        """Say several texts: for each its file or its error."""
        return await service.batch(request)

    @router.get("/v1/audio/voices", responses=answers(VoicesAnswer))
    async def list_voices() -> Response:
        """The voices of the model and those that were uploaded."""
        uploaded = [voice.to_json() for voice in service.voices.list()]
        return JSONResponse({"voices": list(service.engine.model.voices), "uploaded_voices": uploaded})

    @router.post(
        "/v1/audio/voices", openapi_extra=voice_body(), responses=answers(StoredVoice, 400, 409, 413, 429, 500, 503)
    )
    async def create_voice(request: Request) -> Response:
        """Upload a voice."""
        return JSONResponse((await service.add_voice(request)).to_json())

    @router.delete("/v1/audio/voices/{name}", responses=answers(VoiceDeleted, 400, 404))
    async def delete_voice(name: str) -> Response:
        """Forget an uploaded voice."""
        service.delete_voice(name)
        return JSONResponse({"id": name, "name": name, "object": "audio.voice.deleted", "deleted": True})

    @router.websocket("/v1/audio/speech/stream")
    async def stream_speech(socket: WebSocket) -> None:
        """Text bit by bit in, speech out."""
        await service.talk(socket)

    return router
