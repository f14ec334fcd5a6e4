"""Request models: what a client may ask for, with ranges, grids and defaults. pydantic does the checking.

A family subclasses ``VideoRequest`` with its own fields; HTTP, the Python API and the worker validate with the same
class, so a request that reaches a worker has been checked before anything was queued.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

import annotated_types
import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from omni_core.errors import RequestError

MAX_SEED = 2**63 - 1


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "must not be blank")
    return value


Prompt = Annotated[str, AfterValidator(_not_blank), Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})]
"""Text that is more than white space."""


class FrameGrid:
    """Allows numbers of the form ``step * k + 1``, k >= 0: what a causal video VAE can decode.

    Use as ``num_frames: Annotated[int, FrameGrid(4)] = Field(81, ge=1, le=241)``.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {**handler(schema), "format": f"{self.step}k+1"}

    def check(self, value: int) -> int:
        if (value - 1) % self.step:
            below = (value - 1) // self.step * self.step + 1
            raise PydanticCustomError(
                "grid",
                "must be of the form {step}k+1 (nearest: {below} or {above})",
                {"step": self.step, "below": max(below, 1), "above": below + self.step},
            )
        return value

    def nearest(self, value: float) -> int:
        """The allowed number nearest to ``value``, at least 1."""
        return max(0, round((value - 1) / self.step)) * self.step + 1


class VideoRequest(BaseModel):
    """What every video request has. A family narrows the ranges and sets the defaults in a subclass.

    ``width``, ``height``: pixels. ``fps``: frames per second of the written file. ``seed``: integer; drawn at random
    by the front end where it is absent, and reported with the result.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompt: Prompt = Field(description="What to show.")
    width: int = Field(ge=16, le=4096, multiple_of=16, description="Width in pixels.")
    height: int = Field(ge=16, le=4096, multiple_of=16, description="Height in pixels.")
    num_frames: int = Field(ge=1, le=1024, description="Number of frames.")
    fps: int = Field(ge=1, le=120, description="Frames per second of the written file.")
    num_inference_steps: int = Field(ge=1, le=1000, description="Number of denoising steps.")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="Seed of the noise; random where absent.")


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse_request(model: type[RequestT], values: Mapping[str, Any], *, strict: bool = True) -> RequestT:
    """Validate ``values`` against ``model``.

    ``strict`` refuses a string where a number is meant; form fields, which are all strings, are parsed without it.

    Raises:
        RequestError: with the field at fault, its value, and the allowed range or the nearest known name.
    """
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
    for key, value in plain.items():
        if isinstance(value, str) and not is_unicode(value):
            raise RequestError(f"{key} holds characters that are not Unicode (lone surrogates)", param=key)
        if isinstance(value, str) and "_" in value and not strict and _is_number(model, key):
            # pydantic takes 3_0 for 30, as Python does
            raise RequestError(f"{key}={value!r:.80}: must be {describe_field(model, key)}", param=key)
    try:
        return model.model_validate(plain, strict=strict)
    except ValidationError as error:
        # An unknown name first: it is often why another field is missing.
        first = min(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
        location = [str(part) for part in first["loc"]]
        name = location[0] if location else None
        raise RequestError(_explain(model, name, first), param=name) from None


def _is_number(model: type[BaseModel], name: str) -> bool:
    """Whether there is a field of this name that takes numbers and no strings."""
    if name not in model.model_fields:
        return False
    annotation = model.model_fields[name].annotation
    kinds = {annotation, *get_args(annotation)}
    kinds |= {inner for kind in kinds if get_origin(kind) is Annotated for inner in get_args(kind)[:1]}
    return bool(kinds & {int, float}) and str not in kinds


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8; a JSON escape can make a string that cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _explain(model: type[BaseModel], name: str | None, error: Any) -> str:
    if name is None:
        return str(error["msg"])
    if error["type"] == "extra_forbidden":
        return unknown_parameter(name, model.model_fields)
    if error["type"] == "missing":
        return f"{name} is required: {describe_field(model, name)}"
    got = repr(error["input"])
    got = got if len(got) <= 80 else got[:77] + "..."
    message = error["msg"][0].lower() + error["msg"][1:]
    message = message.removeprefix("input ").removeprefix("value error, ")
    if error["type"] == "too_long" and isinstance(error["input"], str):  # pydantic counts items of a string
        message = f"must have at most {error['ctx']['max_length']} characters, not {len(error['input'])}"
    return f"{name}={got}: {message} (allowed: {describe_field(model, name)})"


def unknown_parameter(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """One line that says that ``name`` is unknown, what is close to it, and what there is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown parameter {name!r}; {hint}allowed: {', '.join(sorted(known))}"


def describe_field(model: type[BaseModel], name: str) -> str:
    """The allowed values of a field in words, such as ``an integer from 16 to 2048, a multiple of 16; default 480``."""
    info = model.model_fields[name]
    schema = model.model_json_schema()["properties"][name]
    schema = next((s for s in schema.get("anyOf", []) if s.get("type") != "null"), schema)
    kinds = {"integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false"}
    words = [kinds.get(schema.get("type", ""), "a value")]
    if schema.get("format") == "binary":
        return str(schema["description"])
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is None and schema.get("type") == "integer" and "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1
    if "exclusiveMinimum" in schema:
        words.append(f"above {schema['exclusiveMinimum']}")
    if low is not None and high is not None:
        words.append(f"from {low} to {high}")
    elif low is not None:
        words.append(f"at least {low}")
    elif high is not None:
        words.append(f"at most {high}")
    if "enum" in schema:
        words = ["one of " + ", ".join(map(repr, schema["enum"]))]
    if "maxLength" in schema:
        words.append(f"of at most {schema['maxLength']} characters")
    text = " ".join(words)
    if "multipleOf" in schema:
        text += f", a multiple of {schema['multipleOf']}"
    for meta in info.metadata:
        if isinstance(meta, FrameGrid):
            text += f", of the form {meta.step}k+1"
    if info.metadata and any(isinstance(m, annotated_types.MinLen) for m in info.metadata):
        text += ", not empty"
    if not info.is_required() and info.default is not None:
        text += f"; default {info.default!r}"
    return text
