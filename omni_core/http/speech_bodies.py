"""From the fields of a speech request to the family's request and the file that is to come of it."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from omni_core.audio import (
    FORMATS,
    MAX_SOUND_BYTES,
    SAMPLE_RATES,
    SPEEDS,
    Samples,
    SoundEncoder,
    check_sound_size,
    output_rate,
    read_sound,
)
from omni_core.errors import RequestError
from omni_core.http.bodies import check_model
from omni_core.http.voices import NAME, VoiceStore
from omni_core.requests import Prompt, parse_request, unknown_parameter
from omni_core.speech.engine import SpeechEngine
from omni_core.speech.requests import SET_BY_THE_SERVER, SpeechRequest

MAX_SPEECH_BODY_BYTES = 16 << 20
"""Largest body of a request for speech or of an uploaded voice: reference sound in base64 and some text."""

MAX_BATCH_BODY_BYTES = 64 << 20

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
assert set(FORMATS) == set(Format.__args__)  # type: ignore[attr-defined]

FetchSound = Callable[[str], Awaitable[bytes]]
"""Fetches a file by URL. Raises ``RequestError`` for one that it may not or cannot fetch."""

_PLACEHOLDER_SECONDS = 1


class Encoding(BaseModel):
    """The file that speech becomes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    response_format: Format = Field(default="mp3", description="Format of the sound; pcm is s16le, mono.")
    sample_rate: int | None = Field(
        default=None, ge=SAMPLE_RATES[0], le=SAMPLE_RATES[1], description="Samples a second; the model's where absent."
    )
    speed: float = Field(default=1.0, ge=SPEEDS[0], le=SPEEDS[1], description="How fast; the pitch stays.")

    def encoder(self, native: int, *, streamed: bool) -> SoundEncoder:
        """An encoder for sound at the rate ``native``. Raises ``RequestError``."""
        rate = output_rate(self.response_format, native, self.sample_rate)
        return SoundEncoder(self.response_format, rate, source_rate=native, speed=self.speed, streamed=streamed)


class Delivery(Encoding):
    """The file, and how it is sent."""

    stream: bool = Field(default=True, description="Send sound while it is made; if false, a whole file at the end.")
    stream_format: Literal["audio", "sse"] = Field(
        default="audio", description="The file itself, or events with pieces of it; events need stream."
    )


class SocketEncoding(Encoding):
    """The file, and how a WebSocket sends it."""

    stream_audio: bool = Field(default=False, description="Send sound while it is made, in more than one frame.")


class VoiceUpload(BaseModel):
    """The fields of an uploaded voice beside the sample."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=f"^{NAME}$", description="What to call it: 1 to 64 letters, digits, _ and -.")
    consent: Prompt = Field(max_length=1_000, description="How the speaker has agreed; kept with the voice.")
    ref_text: Prompt | None = Field(default=None, max_length=4_000, description="What is said in the sample.")
    speaker_description: str | None = Field(default=None, max_length=1_000, description="Who speaks.")
    type: Literal["audio_sample"] = Field(default="audio_sample", description="OpenAI's; there is one kind.")


EncodingT = TypeVar("EncodingT", bound=Encoding)


@dataclass(frozen=True)
class Wanted:
    """A request that has been checked, and the file that is to come of it."""

    request: SpeechRequest
    encoding: Encoding


def client_fields(model: type[SpeechRequest], encoding: type[Encoding]) -> tuple[str, ...]:
    """Every field that a client may name."""
    own = [name for name in model.model_fields if name not in SET_BY_THE_SERVER]
    return ("model", *own, "ref_audio", *encoding.model_fields)


class SpeechReader:
    """Checks requests: everything that can be said of one without looking elsewhere first, then its reference sound.

    Args:
        engine: what generates.
        voices: the uploaded voices.
        models: the names under which the model is served.
        fetch: fetches reference sound by URL.
    """

    def __init__(self, engine: SpeechEngine, voices: VoiceStore, models: Sequence[str], fetch: FetchSound) -> None:
        self._engine, self._voices, self._models, self._fetch = engine, voices, models, fetch

    def check_names(self, fields: Mapping[str, Any], encoding: type[Encoding], *others: str) -> None:
        """Raise ``RequestError`` for a field that there is not, ``HttpError`` for a model."""
        known = [*client_fields(self._engine.request_model, encoding), *others]
        for name in fields:
            if name not in known:
                shown = name if len(name) <= 80 else f"{name[:77]}..."
                raise RequestError(unknown_parameter(shown, known), param=shown)
        check_model(fields, self._models)

    async def read(self, fields: Mapping[str, Any], encoding: type[EncodingT], *, typed: bool) -> Wanted:
        """The request that ``fields`` ask for.

        Raises:
            RequestError: with the field at fault.
            HttpError: there is no such model.
        """
        self.check_names(fields, encoding)
        given = {name: value for name, value in fields.items() if value is not None and name != "model"}
        parsed = parse_request(encoding, {n: v for n, v in given.items() if n in encoding.model_fields}, strict=typed)
        output_rate(parsed.response_format, self._engine.model.sample_rate, parsed.sample_rate)
        if isinstance(parsed, Delivery) and parsed.stream_format == "sse" and not parsed.stream:
            raise RequestError("stream_format='sse' needs stream", "stream_format")
        sound = given.pop("ref_audio", None)
        values = {name: value for name, value in given.items() if name not in encoding.model_fields}
        if "voice" in values:
            self._take_voice(values, sound)
        if sound is None:
            return Wanted(self._engine.parse(values, strict=typed), parsed)
        data = _inline(sound)
        rate = self._engine.model.sample_rate
        values["reference"] = np.zeros(_PLACEHOLDER_SECONDS * rate, np.float32)
        values["seed"] = self._engine.parse(values, strict=typed).seed
        values["reference"] = await self._sound(sound if data is None else data)
        return Wanted(self._engine.parse(values, strict=typed), parsed)

    def check_shared(self, fields: Mapping[str, Any]) -> None:
        """Raise ``RequestError`` for a field of a batch that can be of no use to any item, whatever the item has."""
        given = {name: value for name, value in fields.items() if value is not None and name != "model"}
        if "ref_audio" in given:
            _inline(given.pop("ref_audio"))
        if "voice" in given:
            given["voice"] = _voice_name(given["voice"])
        own = {name: value for name, value in given.items() if name not in Encoding.model_fields}
        parse_request(Encoding, {name: value for name, value in given.items() if name not in own})
        try:
            parse_request(self._engine.request_model, {"input": "-", **own})
        except RequestError as error:
            if error.param in own:  # else it is of fields together, and an item may have the others
                raise

    def _take_voice(self, values: dict[str, Any], sound: Any) -> None:
        """Put an uploaded voice in the place of its name."""
        voice = values["voice"] = _voice_name(values["voice"])
        if not isinstance(voice, str) or self.is_built_in(voice) or (found := self._voices.get(voice)) is None:
            return
        for name, value in (("ref_audio", sound), ("ref_text", values.get("ref_text"))):
            if value is not None:
                raise RequestError(f"{name} and the uploaded voice {voice!r} exclude each other", name)
        stored, encoded = found
        del values["voice"]
        values["stored_voice"] = dict(encoded)
        if stored.ref_text is not None:
            values["ref_text"] = stored.ref_text

    def is_built_in(self, name: str) -> bool:
        """Whether the checkpoint has a voice of this name."""
        return name.casefold() in {voice.casefold() for voice in self._engine.model.voices}

    async def _sound(self, source: str | bytes) -> Samples:
        try:
            data = source if isinstance(source, bytes) else await self._fetch(source)
            return await asyncio.to_thread(read_sound, data, self._engine.model.sample_rate)
        except RequestError as error:
            raise RequestError(f"ref_audio: {error}", "ref_audio") from None

    async def read_voice(self, fields: Mapping[str, Any]) -> tuple[VoiceUpload, Samples]:
        """What is uploaded as a voice, its sample read. Raises ``RequestError`` or ``HttpError``."""
        values = {name: value for name, value in fields.items() if name != "audio_sample"}
        upload = parse_request(VoiceUpload, values, strict=False)
        if self.is_built_in(upload.name):
            raise RequestError(f"name={upload.name!r} is a voice of the model", "name")
        if upload.name.casefold() in {name.casefold() for name in self._engine.model.reserved_voices}:
            raise RequestError(f"name={upload.name!r} is reserved: requests mean something else by it", "name")
        self._voices.check_free(upload.name)
        sample = fields.get("audio_sample")
        if not isinstance(sample, bytes):
            raise RequestError(f"audio_sample must be a file of at most {MAX_SOUND_BYTES} bytes", "audio_sample")
        try:
            return upload, await asyncio.to_thread(read_sound, sample, self._engine.model.sample_rate)
        except RequestError as error:
            raise RequestError(f"audio_sample: {error}", "audio_sample") from None


def _voice_name(value: Any) -> Any:
    """The name in ``{"id": NAME}``, as OpenAI's client calls a voice of one's own; anything else as it is."""
    if not isinstance(value, Mapping):
        return value
    if set(value) != {"id"} or not isinstance(value["id"], str):
        raise RequestError("voice must be a name or an object with id", "voice")
    return value["id"]


def _inline(value: Any) -> bytes | None:
    """The bytes of reference sound that came with the request; ``None`` where it is a URL to fetch."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise RequestError("ref_audio must be a file, a URL, a data URL or base64", "ref_audio")
    if value[:5].lower() == "data:":
        head, comma, value = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise RequestError("ref_audio: a data URL must look like data:audio/wav;base64,...", "ref_audio")
    elif ":" in value[:16]:
        return None
    try:
        check_sound_size(len(value) // 4 * 3 - 2)
        return base64.b64decode(value, validate=True)
    except RequestError as error:
        raise RequestError(f"ref_audio: {error}", "ref_audio") from None
    except (binascii.Error, ValueError):
        shown = value if len(value) <= 40 else f"{value[:37]}..."
        raise RequestError(f"ref_audio={shown!r} is neither a URL nor base64", "ref_audio") from None
