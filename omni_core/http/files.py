"""Files: an answer that is one, with what has to happen once it is sent, however that ends; folders of one server."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from omni_core.errors import ConfigError
from omni_core.folders import LOCK
from omni_core.http.errors import HttpError, error_response


def lock_folder(folder: Path, what: str) -> int:
    """A descriptor that keeps other servers out of ``folder`` until it is closed.

    Raises:
        ConfigError: another server has it; calls the folder ``what``.
    """
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"{what} {folder} is in use by another server") from None
    return lock


class FileAnswer(FileResponse):
    """A file, or the part of it that the client asks for.

    A range that cannot be is answered as an error in our shape, not as Starlette's text.

    Args:
        done: called once the answer is over: sent, refused, or its client gone. (Starlette's ``background`` is not
            where the range is refused or sending fails.)
    """

    def __init__(self, *arguments: Any, done: Callable[[], None], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def checked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                headers = {name.decode(): value.decode() for name, value in message["headers"]}
                raise _BadRange(message["status"], {k: v for k, v in headers.items() if k == "content-range"})
            await send(message)

        try:
            await super().__call__(scope, receive, checked)
        except _BadRange as bad:
            answer = error_response(HttpError(bad.status, "the file has no such range", "Range"))
            answer.headers.update(bad.headers)
            await answer(scope, receive, send)
        finally:
            self._done()


class _BadRange(Exception):
    def __init__(self, status: int, headers: dict[str, str]) -> None:
        super().__init__(status)
        self.status, self.headers = status, headers
