"""Images that a request carries: one type from HTTP and the Python API to the worker."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_SIDE = 8192
"""Pixels along either side; larger images are refused before they are decoded."""


@dataclass(frozen=True, eq=False)
class InputImage:
    """An image: uint8 [height, width, 3], RGB.

    As a field of a request model it takes an ``InputImage``, an array of that shape, a PIL image, or the bytes of an
    image file.
    """

    pixels: npt.NDArray[np.uint8]

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, as PIL has it."""
        return self.pixels.shape[1], self.pixels.shape[0]

    def to_pil(self) -> Any:
        """The image as a ``PIL.Image.Image``."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    @classmethod
    def parse(cls, value: Any) -> InputImage:
        """Whatever the field takes.

        Raises:
            PydanticCustomError: it is no image, or too large.
        """
        if isinstance(value, InputImage):
            return value
        if isinstance(value, dict) and set(value) == {"height", "width", "rgb"}:  # from ``serialise``
            shape = (value["height"], value["width"], 3)
            return cls(np.frombuffer(value["rgb"], np.uint8).reshape(shape))
        if isinstance(value, bytes | bytearray | memoryview):
            value = _decode(bytes(value))
        if hasattr(value, "convert") and hasattr(value, "getbands"):
            value = np.asarray(value.convert("RGB"))
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
            raise PydanticCustomError(
                "image", "must be an image: a file, a PIL image, or a uint8 array [height, width, 3]"
            )
        _check_size(value.shape[1], value.shape[0])
        return cls(np.ascontiguousarray(value))

    def serialise(self) -> dict[str, Any]:
        """The form in which it crosses process borders."""
        return {"height": self.pixels.shape[0], "width": self.pixels.shape[1], "rgb": self.pixels.tobytes()}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(cls.serialise)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "format": "binary", "description": "an image: a file, a data URL or a URL"}


def _check_size(width: int, height: int) -> None:
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise PydanticCustomError("image", "must be at most {limit} pixels along each side", {"limit": MAX_SIDE})


def _decode(data: bytes) -> Any:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data))
        _check_size(*image.size)
        if image.format == "EPS":
            raise ValueError("it is a program for Ghostscript, which is not run")
        return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, PydanticCustomError):
            raise
        raise PydanticCustomError("image", "is no image that can be read: {why}", {"why": str(error)}) from None
