"""What ``/openapi.json`` says of Omni's routes: bodies, answers and errors."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field

from omni_core.http.bodies import LONGEST, SHARED
from omni_core.http.errors import ERROR_TYPES
from omni_core.http.images import ALIASES, image_fields
from omni_core.http.jobs import VideoJob
from omni_core.requests import VideoRequest


class ErrorBody(BaseModel):
    """What went wrong. ``param``: the field at fault, where it is one."""

    message: str = Field(min_length=1)
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """An error, as OpenAI's clients read it."""

    error: ErrorBody


class JobPage(BaseModel):
    """A page of jobs."""

    object: Literal["list"]
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """A job that is gone."""

    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]


class StageStatus(BaseModel):
    """One stage, see ``SupervisedStage.status``."""

    state: Literal["running", "asleep", "restarting", "stopped"]
    restarts: int = Field(ge=0)
    reason: str | None


class StagesAnswer(BaseModel):
    """Every stage by name."""

    stages: dict[str, StageStatus]


class HealthAnswer(StagesAnswer):
    """Whether the server can serve, and every stage by name."""

    status: Literal["ok", "unhealthy"]


Responses = dict[int | str, dict[str, Any]]


def answers(model: Any, *errors: int) -> Responses:
    """The declared answers of a route: ``model`` as JSON, or one of the errors with these status codes."""
    return {200: {"model": model}, **error_answers(*errors)}


def file_answers(kind: str, *errors: int, headers: tuple[str, ...] = (), ranges: bool = False) -> Responses:
    """The declared answers of a route that answers with a file of this media type, in ``ranges`` if asked."""
    file: dict[str, Any] = {"content": {kind: {"schema": {"type": "string", "format": "binary"}}}}
    if headers:
        file["headers"] = {name: {"schema": {"type": "string"}} for name in headers}
    partial: Responses = {206: {**file, "description": "Part of the file"}} if ranges else {}
    return {200: {**file, "description": "The file"}, **partial, **error_answers(*errors)}


def error_answers(*errors: int) -> Responses:
    """The declared errors of a route."""
    return {status: {"model": ErrorAnswer, "description": ERROR_TYPES[status]} for status in errors}


def describe(app: FastAPI) -> None:
    """Make the app's description say what is so: FastAPI declares a 422, and vLLM's app answers 400 instead."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """An optional JSON body."""
    return {"requestBody": {"content": {"application/json": {"schema": model.model_json_schema()}}}}


def video_body(model: type[VideoRequest], models: list[str]) -> dict[str, Any]:
    """The body of a video request: the family's fields and those that every video endpoint takes.

    In JSON, null is the same as leaving a field out.
    """
    schema = model.model_json_schema()
    images = image_fields(model)
    required = schema.get("required", [])
    fields = {**schema["properties"], **_shared(models, {n: f.get_default() for n, f in model.model_fields.items()})}
    form = {name: field for name, field in fields.items() if name not in images}
    in_json = {name: field if name in required else nullable(field) for name, field in form.items()}
    for name in (*images, *ALIASES) if images else ():
        about = {"description": schema["properties"].get(name, {}).get("description", f"The same as {images[0]}.")}
        form[name] = {"type": "string", "format": "binary", **about}
        in_json[name] = {**(_IMAGE if name in required else nullable(_IMAGE)), **about}
    form["extra_params"] = {"type": "string", "contentMediaType": "application/json", **_about(form["extra_params"])}
    content = {
        kind: {"schema": {**schema, "properties": properties}}
        for kind, properties in (("application/json", in_json), ("multipart/form-data", form))
    }
    return {"requestBody": {"required": True, "content": content}}


RANGE_HEADER = {
    "parameters": [
        {
            "name": "Range",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "pattern": "^bytes="},
            "description": "The part of the file to send.",
        }
    ]
}
"""The header of a route that answers with a file in ranges."""

_URL = {"type": "string", "description": "A URL or a data URL."}
_IMAGE = {
    "anyOf": [
        _URL,
        {
            "type": "object",
            "properties": {
                "image_url": {
                    "anyOf": [_URL, {"type": "object", "properties": {"url": _URL}, "required": ["url"]}],
                },
            },
            "required": ["image_url"],
            "additionalProperties": False,
        },
    ]
}
"""An image in a JSON body."""


def _shared(models: list[str], defaults: dict[str, Any]) -> dict[str, Any]:
    sized = all(isinstance(defaults[name], int) for name in ("width", "height", "num_frames", "fps"))
    size, seconds = (
        (
            {"examples": [example]}
            for example in (
                f"{defaults['width']}x{defaults['height']}",
                f"{defaults['num_frames'] / defaults['fps']:g}",
            )
        )
        if sized
        else ({}, {})
    )
    shared = {
        "model": {"type": "string", "enum": models, "description": "A served model name."},
        "size": {
            "type": "string",
            "pattern": "^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$",
            "description": "WIDTHxHEIGHT in pixels.",
            **size,
        },
        "seconds": {
            "anyOf": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": LONGEST}, {"type": "string"}],
            "description": "Duration; the nearest allowed number of frames is taken.",
            **seconds,
        },
        "extra_params": {"type": "object", "description": "Further fields of the model, for clients that nest them."},
    }
    assert set(shared) == set(SHARED)
    return shared


def _about(field: dict[str, Any]) -> dict[str, Any]:
    return {"description": field["description"]}


def nullable(field: dict[str, Any]) -> dict[str, Any]:
    """``field``, or null."""
    inner = {
        name: value for name, value in field.items() if name not in ("title", "description", "default", "examples")
    }
    outer = {name: value for name, value in field.items() if name not in inner}
    options = inner["anyOf"] if set(inner) == {"anyOf"} else [inner]
    null = {"type": "null"}
    return {"anyOf": [*options, *([] if null in options else [null])], **outer}
