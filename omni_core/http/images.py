"""Images of a request: from an upload, a data URL or a URL to the family's image fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_args

import numpy as np

from omni_core.errors import RequestError
from omni_core.http.parsing import load_json
from omni_core.images import InputImage
from omni_core.requests import VideoRequest

ALIASES = ("input_reference", "image_reference")
"""OpenAI's name and the field's other name for the first image of a request."""

Fetch = Callable[[str], Awaitable[InputImage]]
"""Fetches an image by URL or data URL. Raises ``RequestError`` for one that it may not or cannot fetch."""

_PLACEHOLDER = InputImage(np.zeros((16, 16, 3), np.uint8))


def image_fields(model: type[VideoRequest]) -> tuple[str, ...]:
    """The image fields of a request model, the first image first."""
    return tuple(
        name
        for name, info in model.model_fields.items()
        if info.annotation is InputImage or InputImage in get_args(info.annotation)
    )


def rename_aliases(values: dict[str, Any], model: type[VideoRequest]) -> None:
    """Put what was sent as ``input_reference`` or ``image_reference`` into the model's first image field.

    Raises:
        RequestError: the model takes no image, or gets the same one twice.
    """
    for alias in ALIASES:
        if (value := values.pop(alias, None)) is None:
            continue
        names = image_fields(model)
        if not names:
            raise RequestError(f"{alias}: this model takes no image", param=alias)
        if names[0] in values:
            raise RequestError(f"{alias} and {names[0]} exclude each other", param=alias)
        values[names[0]] = value


def with_placeholders(values: Mapping[str, Any], model: type[VideoRequest]) -> dict[str, Any]:
    """``values`` without their images, to check everything else before any is fetched or read."""
    names = image_fields(model)
    return {
        name: _PLACEHOLDER if name in names and (isinstance(value, bytes) or _url(name, value)) else value
        for name, value in values.items()
    }


async def fetch_images(values: Mapping[str, Any], model: type[VideoRequest], fetch: Fetch) -> dict[str, Any]:
    """``values`` with the images fetched.

    Raises:
        RequestError: an image cannot be fetched; names the field.
    """
    fetched = dict(values)
    for name in image_fields(model):
        if url := _url(name, values.get(name)):
            try:
                fetched[name] = await fetch(url)
            except RequestError as error:
                raise RequestError(f"{name}: {error}", param=name) from None
    return fetched


def _url(name: str, value: Any) -> str | None:
    """The URL that a field's value names; ``None`` where it is the image itself."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = load_json(value)
        except (ValueError, RecursionError):
            raise RequestError(f"{name} must be a file, a URL, or an object with image_url", param=name) from None
    if isinstance(value, Mapping):
        if set(value) != {"image_url"}:
            raise RequestError(f"{name} must be a file, a URL, or an object with image_url", param=name)
        value = value["image_url"]
        if isinstance(value, Mapping):
            if others := [key for key in value if key != "url"]:
                raise RequestError(f"{name}: image_url has url alone, not {others[0]!r:.80}", param=name)
            value = value.get("url")
        if not isinstance(value, str):
            raise RequestError(f"{name}: image_url must be a string", param=name)
    return value if isinstance(value, str) else None
