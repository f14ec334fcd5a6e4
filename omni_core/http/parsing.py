"""JSON that clients send, read strictly: no name twice, nothing that is not Unicode."""

from __future__ import annotations

import json
from typing import Any

from omni_core.errors import RequestError


def load_json(text: str | bytes) -> Any:
    """The value that ``text`` is.

    Raises:
        RequestError: a name is given twice in an object, or a string holds lone surrogates.
        ValueError, RecursionError: it is not JSON.
    """
    value = json.loads(text, object_pairs_hook=_unique)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the JSON holds characters that are not Unicode (lone surrogates)") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise RequestError(f"{shown(name)} is given twice")
        fields[name] = value
    return fields


def shown(name: str) -> str:
    """A client's name for something as it can stand in a message: bounded, and Unicode."""
    return (name if len(name) <= 80 else f"{name[:77]}...").encode("utf-8", "replace").decode()
