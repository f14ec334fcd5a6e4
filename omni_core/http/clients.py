"""What becomes of work whose client leaves: it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def until_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, cancelling it as soon as the client leaves. The request's body must have been read.

    Raises:
        ClientDisconnect: the client left.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker = asyncio.ensure_future(work)
    watcher = asyncio.create_task(disconnected())
    try:
        await asyncio.wait([worker, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
            await asyncio.wait([worker])
