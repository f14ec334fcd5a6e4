"""Single values of the configuration: reading what the user wrote, and checking it against a declared type."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import yaml

from omni_core.errors import ConfigError


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown WHAT 'name'; did you mean 'nome'? Known: a, b``; a long list is left out where something is close."""
    names = sorted(known)
    near = difflib.get_close_matches(underscored(name), names, n=1)
    message = f"unknown {what} {name!r}"
    if near:
        message += f"; did you mean {near[0]!r}?"
    if near and len(names) > 12:
        return message
    return f"{message}{'' if near else ';'} known: {', '.join(names) or 'none'}"


def underscored(name: str) -> str:
    """The name as a Python identifier: ``tensor-parallel-size`` and ``tensor_parallel_size`` are one key."""
    return name.replace("-", "_")


class YamlLoader(yaml.SafeLoader):
    """Safe YAML whose numbers are those of YAML 1.2 and JSON: ``1e-3`` is one."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def parse_value(text: str, where: str) -> Any:
    """Read a value of ``--set``: a YAML scalar, list or mapping, of which JSON is a part.

    Raises:
        ConfigError: the text is not YAML.
    """
    try:
        return yaml.load(text, YamlLoader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: cannot read {text!r} as a YAML or JSON value: {reason}") from None


def check_value(value: Any, annotation: Any, where: str, default: Any = dataclasses.MISSING) -> Any:
    """Check ``value`` against ``annotation`` as far as that is cheap, and return it.

    A whole number is a good float and becomes one, so that a layer's spelling leaves no trace. A value equal to the
    default is always good (vLLM declares several ``int`` fields whose default is ``None``). Annotations that are
    neither plain types, ``Literal``, unions nor containers of these are left to vLLM.

    Raises:
        ConfigError: naming ``where``, the value and what was expected.
    """
    if value is None and default is None:
        return value
    fits, value = _fit(value, annotation)
    if not fits:
        raise ConfigError(f"{where}: expected {_describe(annotation)}, got {value!r}")
    return value


def _fit(value: Any, annotation: Any) -> tuple[bool, Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _fit(value, arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments), value
    if annotation is None or annotation is type(None):
        return value is None, value
    if annotation is float and type(value) is int:
        return True, float(value)
    if annotation in (int, float):
        return type(value) is annotation, value
    if annotation in (bool, str):
        return isinstance(value, annotation), value
    if (origin or annotation) in (list, set, tuple):
        items = isinstance(value, (list, tuple, set, frozenset))
        return items and (not arguments or all(_fit(item, arguments[0])[0] for item in value)), value
    if (origin or annotation) is dict:
        return isinstance(value, Mapping), value
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return isinstance(value, (Mapping, annotation)), value
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return isinstance(value, (str, int, annotation)), value
    return True, value


def _fit_union(value: Any, members: tuple[Any, ...]) -> tuple[bool, Any]:
    exact = [(True, value)] if any(type(value) is member for member in members) else []
    fits = exact + [result for member in members if (result := _fit(value, member))[0]]
    return fits[0] if fits else (False, value)


def _describe(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(member) for member in arguments))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    words = {
        bool: "true or false", int: "an integer", float: "a number", str: "a string",
        list: "a list", set: "a list", tuple: "a list", dict: "a mapping",
    }  # fmt: skip
    if annotation is None or annotation is type(None):
        return "null"
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return "a mapping"
    return words.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))
