"""What ``/openapi.json`` says of the speech routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from omni_core.audio import FORMATS
from omni_core.http.declared import ErrorBody, Responses, error_answers, nullable
from omni_core.http.speech_answers import EVENTS
from omni_core.http.speech_bodies import Delivery, Encoding, VoiceUpload, client_fields
from omni_core.http.voices import StoredVoice
from omni_core.speech.requests import SpeechRequest

HEADERS = {
    "X-Request-Id": "the request's id in log and error messages",
    "X-Seed": "the seed, drawn by the server where the request had none",
    "X-Sample-Rate": "samples a second of the file",
    "X-Finish-Reason": "`stop` or `length`; with `stream=false`, like those below",
    "X-Input-Tokens": "tokens of text",
    "X-Output-Tokens": "frames of speech",
    "X-Total-Tokens": "the sum of both",
}
"""Headers of an answer with sound."""

_REFERENCE = "Sound to speak like: a URL, a data URL, base64 or, in a form, a file."


class Usage(BaseModel):
    """Tokens of text in, frames of speech out."""

    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class BatchSound(BaseModel):
    """An item that was spoken; ``audio_data`` is the file in base64."""

    model_config = ConfigDict(extra="forbid")

    index: int = Field(ge=0)
    status: Literal["success"]
    audio_data: str
    media_type: str
    sample_rate: int
    seed: int
    finish_reason: Literal["stop", "length"]
    usage: Usage


class BatchError(BaseModel):
    """An item that was refused or failed."""

    model_config = ConfigDict(extra="forbid")

    index: int = Field(ge=0)
    status: Literal["error"]
    error: ErrorBody


class BatchAnswer(BaseModel):
    """The result of each item, in the order of the items."""

    object: Literal["audio.speech.batch"]
    results: list[BatchSound | BatchError]
    total: int
    succeeded: int
    failed: int


class VoicesAnswer(BaseModel):
    """Names of the model's own voices, and the uploaded ones."""

    voices: list[str]
    uploaded_voices: list[StoredVoice]


class VoiceDeleted(BaseModel):
    """An uploaded voice that is gone."""

    id: str
    name: str
    object: Literal["audio.voice.deleted"]
    deleted: Literal[True]


def sound_answers(*errors: int) -> Responses:
    """The declared answers of a route that answers with sound."""
    file = {"schema": {"type": "string", "format": "binary"}}
    content = {kind.media_type: file for kind in FORMATS.values()} | {EVENTS: {"schema": {"type": "string"}}}
    headers = {name: {"schema": {"type": "string"}, "description": text} for name, text in HEADERS.items()}
    return {200: {"description": "The sound", "content": content, "headers": headers}, **error_answers(*errors)}


def _fields(model: type[SpeechRequest], models: list[str], encoding: type[Encoding]) -> dict[str, Any]:
    """The schema of every field that a client may name, as a form has it."""
    of_family, of_file = model.model_json_schema(), encoding.model_json_schema()
    own = {"model": {"type": "string", "enum": models, "description": "A served model name."}}
    own["ref_audio"] = {"type": "string", "description": _REFERENCE}
    known = {**of_family["properties"], **of_file["properties"], **own}
    return {name: known[name] for name in client_fields(model, encoding)}


def _object(model: type[SpeechRequest], properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "additionalProperties": False, "properties": properties, "required": required}
    if definitions := model.model_json_schema().get("$defs"):
        schema["$defs"] = definitions
    return schema


def _in_json(fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    named = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
    voice = {**nullable(fields["voice"])}
    voice["anyOf"] = [*voice["anyOf"], {**named, "additionalProperties": False}]
    return {n: field if n in required else nullable(field) for n, field in fields.items()} | {"voice": voice}


def speech_body(model: type[SpeechRequest], models: list[str]) -> dict[str, Any]:
    """The body of a request for speech. In JSON, null is the same as leaving a field out."""
    fields = _fields(model, models, Delivery)
    required = model.model_json_schema()["required"]
    form = {**fields, "ref_audio": {**fields["ref_audio"], "format": "binary"}}
    return _body(
        {
            "application/json": _object(model, _in_json(fields, required), required),
            "multipart/form-data": _object(model, form, required),
        }
    )


def batch_body(model: type[SpeechRequest], models: list[str], most: int) -> dict[str, Any]:
    """The body of a batch: fields for all items, and the items."""
    fields = _in_json(_fields(model, models, Encoding), required=model.model_json_schema()["required"])
    item = _object(model, fields, ["input"])
    item.pop("$defs", None)
    shared = {name: field for name, field in fields.items() if name != "input"}
    items = {"type": "array", "items": item, "minItems": 1, "maxItems": most, "description": "What to say."}
    return _body({"application/json": _object(model, {**shared, "items": items}, ["items"])})


def voice_body() -> dict[str, Any]:
    """The body of an uploaded voice."""
    schema = VoiceUpload.model_json_schema()
    sample = {"type": "string", "format": "binary", "description": "Up to 60 seconds of the voice, at most 10 MiB."}
    properties = {"audio_sample": sample, **schema["properties"]}
    required = ["audio_sample", *schema["required"]]
    return _body({"multipart/form-data": {**schema, "properties": properties, "required": required}})


def _body(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {kind: {"schema": s} for kind, s in schemas.items()}}}
