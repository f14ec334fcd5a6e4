"""From an HTTP body to a family's request: OpenAI's field names, forms and JSON; nothing is accepted and ignored."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser

from omni_core.errors import RequestError
from omni_core.http.errors import HttpError
from omni_core.http.images import ALIASES, image_fields, rename_aliases
from omni_core.http.parsing import load_json, shown
from omni_core.requests import FrameGrid, VideoRequest, describe_field, unknown_parameter

SHARED = ("model", "size", "seconds", "extra_params")
"""Fields that every video endpoint takes beside those of the family's request model."""

MAX_BODY_BYTES = 1 << 20
"""Largest body of a request without images."""

MAX_IMAGE_BODY_BYTES = 64 << 20
"""Largest body where the model takes images."""

LONGEST = 3600
"""What ``seconds`` has to stay below."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


def check_model(fields: Mapping[str, Any], models: Sequence[str]) -> None:
    """Raise ``HttpError`` if ``fields`` name a model that is not among the served ones."""
    model = fields.get("model")
    if model is not None and model not in models:
        raise HttpError(404, f"the model {model!r:.80} does not exist; this server has {', '.join(models)}", "model")


async def read_body(request: Request, *, limit: int, files: Sequence[str] = ()) -> tuple[dict[str, Any], bool]:
    """The fields of a JSON object or of a form, and whether they are typed (JSON) or strings (form).

    ``limit`` is the size of the largest body, ``files`` are the fields that a form may send as files, which are bytes.

    Raises:
        RequestError: the body is neither, or is malformed.
        HttpError: the body is too large.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind in _FORMS:
        return await _read_form(request, kind, limit, files), False
    if kind != "application/json":
        raise RequestError(f"content type {kind!r} is not supported; send application/json or multipart/form-data")
    return read_object(await read_bytes(request, limit), "the body"), True


async def read_bytes(request: Request, limit: int) -> bytes:
    """The whole body. Raises ``HttpError`` where it is larger than ``limit``."""
    return b"".join([chunk async for chunk in _bounded(request, limit)])


def read_object(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises ``RequestError``, in which it is called ``what``, for anything else."""
    try:
        fields = load_json(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"{what} must be a JSON object, got {type(fields).__name__}")
    return fields


async def read_video_body(request: Request, model: type[VideoRequest]) -> tuple[dict[str, Any], bool]:
    """``read_body`` for a video of ``model``."""
    if images := image_fields(model):
        return await read_body(request, limit=MAX_IMAGE_BODY_BYTES, files=(*images, *ALIASES))
    return await read_body(request, limit=MAX_BODY_BYTES)


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body, chunk by chunk. Raises ``HttpError`` as soon as it is too large, whatever its headers say."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise HttpError(413, f"the body is larger than {limit} bytes")
        yield chunk


async def _tail(chunks: AsyncGenerator[bytes, None], tail: bytearray) -> AsyncGenerator[bytes, None]:
    """``chunks``, with the end of what has passed in ``tail``."""
    async for chunk in chunks:
        tail[:] = (tail + chunk)[-80:]
        yield chunk


async def _read_form(request: Request, kind: str, limit: int, files: Sequence[str]) -> dict[str, Any]:
    body = _bounded(request, limit)
    try:
        if kind == "multipart/form-data":
            tail = bytearray()
            body = _tail(body, tail)
            form = await MultiPartParser(request.headers, body, max_files=len(files) + 1, max_fields=100).parse()
            if not bytes(tail).rstrip().endswith(b"--"):
                await form.close()
                raise RequestError("the form is cut short: its closing boundary is missing")
        else:
            form = await FormParser(request.headers, body).parse()
            if any(name.lstrip().startswith("{") for name in form):
                raise RequestError("the body looks like JSON; send it with Content-Type: application/json")
    except (MultiPartException, KeyError, UnicodeError) as error:
        raise RequestError(f"the body is not a form: {error}") from None
    fields: dict[str, Any] = {}
    try:
        for name, value in form.multi_items():
            if name in fields:
                raise RequestError(f"{shown(name)} is given twice", param=shown(name))
            if isinstance(value, UploadFile):
                if name not in files:
                    takes = f"a file as {', '.join(files)}" if files else "no file"
                    raise RequestError(f"{shown(name)}: this model takes {takes}", param=shown(name))
                fields[name] = await value.read()
            else:
                fields[name] = value
    finally:
        await form.close()
    return fields


def to_request_values(fields: Mapping[str, Any], model: type[VideoRequest]) -> dict[str, Any]:
    """Translate OpenAI's ``size`` and ``seconds`` and unpack ``extra_params``; everything else is the family's.

    Raises:
        RequestError: an unknown field, a field given twice, or a malformed ``size``, ``seconds`` or ``extra_params``.
    """
    values = {name: value for name, value in fields.items() if name not in SHARED}
    _merge_extra(values, fields.get("extra_params"))
    rename_aliases(values, model)
    for name in values:
        if name not in model.model_fields:
            raise RequestError(unknown_parameter(shown(name), [*model.model_fields, *SHARED]), param=shown(name))
    values = {name: value for name, value in values.items() if value is not None}
    if (size := fields.get("size")) is not None:
        _exclusive(values, "size", "width", "height")
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if not match:
            raise RequestError(f"size={size!r:.80} must look like '832x480' (WIDTHxHEIGHT)", param="size")
        values["width"], values["height"] = int(match[1]), int(match[2])
    if (seconds := fields.get("seconds")) is not None:
        _exclusive(values, "seconds", "num_frames")
        values["num_frames"] = _frames(seconds, values, model)
    return values


def _merge_extra(values: dict[str, Any], extra: Any) -> None:
    if extra is None:
        return
    if isinstance(extra, str):
        try:
            extra = load_json(extra)
        except (ValueError, RecursionError):
            extra = None
    if not isinstance(extra, dict):
        raise RequestError("extra_params must be a JSON object", param="extra_params")
    for name, value in extra.items():
        if name in SHARED:
            raise RequestError(f"{name} belongs beside extra_params, not into it", param=name)
        if name in values:
            raise RequestError(f"{name} is given both directly and in extra_params", param=name)
        values[name] = value


def _exclusive(values: Mapping[str, Any], name: str, *others: str) -> None:
    for other in others:
        if other in values:
            raise RequestError(f"{name} and {other} exclude each other", param=name)


def _positive(value: Any) -> float:
    """A number, or a string that is one, as a float; -1 for anything else."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):  # which Python takes in numbers
        return -1.0
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return -1.0


def _frames(seconds: Any, values: Mapping[str, Any], model: type[VideoRequest]) -> int:
    """The number of frames nearest to ``seconds`` that the model's grid allows."""
    duration, fps = _positive(seconds), _positive(values.get("fps", model.model_fields["fps"].default))
    if not 0 < fps * LONGEST < math.inf:
        raise RequestError(f"fps={values.get('fps')!r:.80}: {describe_field(model, 'fps')}", param="fps")
    if not 0 < duration < LONGEST:
        raise RequestError(f"seconds={seconds!r:.80} must be a number above 0 and below {LONGEST}", param="seconds")
    grids = [meta for meta in model.model_fields["num_frames"].metadata if isinstance(meta, FrameGrid)]
    frames = grids[0].nearest(duration * fps) if grids else max(1, round(duration * fps))
    schema = model.model_json_schema()["properties"]["num_frames"]
    if not schema.get("minimum", 1) <= frames <= schema.get("maximum", frames):
        raise RequestError(
            f"seconds={duration:g} at {fps:g} frames per second is {frames} frames; "
            f"num_frames: {describe_field(model, 'num_frames')}",
            param="seconds",
        )
    return frames
