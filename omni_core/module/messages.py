"""What travels between the front end and a module process, as MessagePack; arrays keep dtype and shape."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

_ARRAY = 1


class Open(msgspec.Struct, tag="open", array_like=True):
    """Begin a session."""

    session: str
    options: dict[str, Any]


class Push(msgspec.Struct, tag="push", array_like=True):
    """One input of a session; ``number`` comes back with its output."""

    session: str
    number: int
    values: dict[str, Any]


class Close(msgspec.Struct, tag="close", array_like=True):
    """End a session; inputs of it that wait are dropped."""

    session: str


class Sleep(msgspec.Struct, tag="sleep", array_like=True):
    """Give up the memory of the device; every session is closed."""


class WakeUp(msgspec.Struct, tag="wake_up", array_like=True):
    """Take it back; nothing to do where the module is awake."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The module is loaded; or it is not, for the reason ``error``. ``cannot_sleep``: see ``StageModule``."""

    error: str | None = None
    cannot_sleep: str = ""


class Changed(msgspec.Struct, tag="changed", array_like=True):
    """The answer to ``Sleep`` and ``WakeUp``, in their order: it is done, or not, for the reason ``error``."""

    error: str | None = None


class Output(msgspec.Struct, tag="output", array_like=True):
    """The output of one input, or why there is none."""

    session: str
    number: int
    values: dict[str, Any] | None = None
    error: str | None = None


Request = Open | Push | Close | Sleep | WakeUp
Reply = Ready | Output | Changed


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes())))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot cross processes; use numbers, strings, bytes, lists or arrays")


def _decode(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    dtype, shape, raw = msgspec.msgpack.decode(data)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)


ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)
REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request, ext_hook=_decode)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply, ext_hook=_decode)
