"""One request, timed, and what became of it; to a videos API as a job that is polled, or synchronously."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx

from omni_core.bench.check import Media
from omni_core.bench.workload import Planned

Mode = Literal["sync", "jobs"]
BodyFormat = Literal["form", "json"]

MIN_POLL_INTERVAL = 0.05
"""Seconds: a job is looked at no more than 20 times a second."""

_CONNECT_SECONDS = 10.0
_FAREWELL_SECONDS = 5.0
_ENDED_BADLY = ("failed", "cancelled", "canceled", "expired", "error")
_MESSAGE_LENGTH = 300

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A server and how to talk to it.

    Attributes:
        base_url: with or without ``/v1`` at its end.
        api_key: sent as a bearer token, if there is one.
        mode: ``jobs`` (``POST /v1/videos``, then poll, then fetch) or ``sync`` (``POST /v1/videos/sync``).
        body: multipart form, as OpenAI has it, or JSON.
        timeout: seconds for one request, from sending it to the last byte of its file.
        poll_interval: seconds between two looks at a job.
    """

    base_url: str
    api_key: str | None = None
    mode: Mode = "jobs"
    body: BodyFormat = "form"
    timeout: float = 600.0
    poll_interval: float = 0.1

    @property
    def root(self) -> str:
        """The server's address without ``/v1``."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass
class Row:
    """What became of one request.

    Attributes:
        index: its place in the workload.
        seed: the seed asked for.
        started: seconds from the start of the run to sending it.
        latency: seconds from sending it to the last byte of its file; ``None`` if it failed.
        num_bytes: size of the file.
        failure: kind of failure, or ``None``.
        error: what the server or the check said of it.
    """

    index: int
    seed: int | None = None
    started: float = 0.0
    latency: float | None = None
    num_bytes: int = 0
    failure: str | None = None
    error: str | None = None

    def fail(self, kind: str, message: str) -> None:
        """Count the request as failed."""
        self.failure, self.error, self.latency = kind, message, None


@dataclass
class VideoRow(Row):
    """What became of a request for a video.

    Attributes:
        size: the size asked for.
        held_back: seconds that it was due and waited for the client's own bound on concurrency.
        queue: seconds until its job was no longer ``queued``; ``None`` where that was not seen.
        job: the job's id.
        seconds_by_phase: what the server says of its work, where it does.
        media: what is in the file.
    """

    size: str | None = None
    held_back: float = 0.0
    queue: float | None = None
    job: str | None = None
    seconds_by_phase: dict[str, float] | None = None
    media: Media | None = None


class RequestFailed(Exception):
    """A request did not give a file.

    Attributes:
        kind: what failures are counted by, such as ``http 429``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Client:
    """Sends requests to ``target``; use it as an asynchronous context manager."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._http = httpx.AsyncClient(
            base_url=target.root,
            headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
            timeout=httpx.Timeout(None, connect=min(_CONNECT_SECONDS, target.timeout)),
            limits=httpx.Limits(max_connections=None),
            follow_redirects=True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def attempt(self, row: Row, work: Callable[[float], Awaitable[T]]) -> T | None:
        """Do the work of a request, which is given when it began; ``row`` takes note. ``None`` if it failed."""
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout):
                result = await work(begin)
        except RequestFailed as error:
            row.fail(error.kind, str(error))
        except httpx.ConnectError as error:
            row.fail("connect", f"cannot connect to {self.target.root}: {error}")
        except (TimeoutError, httpx.TimeoutException):
            row.fail("timeout", f"not done within {self.target.timeout:g} s")
        except httpx.HTTPError as error:
            row.fail("transport", f"{type(error).__name__}: {error}")
        else:
            row.latency = time.perf_counter() - begin
            return result
        return None

    async def text(self, path: str) -> str | None:
        """The text at ``path``, or ``None`` where there is none."""
        try:
            answer = await self._http.get(path, timeout=_CONNECT_SECONDS)
        except httpx.HTTPError:
            return None
        return answer.text if answer.is_success else None


class VideoClient(Client):
    """Asks for videos."""

    async def request(self, planned: Planned, row: VideoRow) -> bytes | None:
        """Send a request and wait for its file; ``row`` takes note. ``None`` if it failed."""

        async def work(begin: float) -> bytes:
            data = await (self._sync if self.target.mode == "sync" else self._job)(planned, row, begin)
            if not data:
                raise RequestFailed("bad output", "the file is empty")
            row.num_bytes = len(data)
            return data

        return await self.attempt(row, work)

    async def _sync(self, planned: Planned, row: VideoRow, begin: float) -> bytes:
        answer = ok(await self._post("/v1/videos/sync", planned))
        with suppress(KeyError, ValueError):
            row.seconds_by_phase = {"inference": float(answer.headers["X-Inference-Time-S"])}
        return answer.content

    async def _job(self, planned: Planned, row: VideoRow, begin: float) -> bytes:
        job = _object(await self._post("/v1/videos", planned))
        if not isinstance(job.get("id"), str):
            raise RequestFailed("protocol", "the server's answer has no id of a job")
        row.job = str(job["id"])
        path = f"/v1/videos/{quote(row.job, safe='')}"
        try:
            job = await self._follow(job, path, row, begin)
            row.seconds_by_phase = phases(job)
            return ok(await self._http.get(f"{path}/content")).content
        except (asyncio.CancelledError, httpx.HTTPError):
            await self._abandon(path)
            raise

    async def _follow(self, job: Mapping[str, Any], path: str, row: VideoRow, begin: float) -> Mapping[str, Any]:
        """Look at a job until it is completed. Raises ``RequestFailed`` if it ends otherwise."""
        while True:
            status = job.get("status")
            if status != "queued" and row.queue is None:
                row.queue = time.perf_counter() - begin
            if status == "completed":
                return job
            if status in _ENDED_BADLY:
                raise RequestFailed(f"job {status}", _message(job) or f"the job is {status}")
            await asyncio.sleep(max(MIN_POLL_INTERVAL, self.target.poll_interval))
            job = _object(await self._http.get(path))

    async def _abandon(self, path: str) -> None:
        """Ask the server to stop a job that nobody waits for any more."""
        with suppress(httpx.HTTPError):
            await self._http.delete(path, timeout=_FAREWELL_SECONDS)

    async def _post(self, path: str, planned: Planned) -> httpx.Response:
        if self.target.body == "json":
            return await self._http.post(path, json=dict(planned.fields))
        parts = {name: (None, _form_value(value)) for name, value in planned.fields.items()}
        return await self._http.post(path, files=parts)


def phases(job: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds by phase, where the server says them; some say only how long they worked."""
    found = job.get("seconds_by_phase") or {"inference": job.get("inference_time_s")}
    if not isinstance(found, dict):
        return None
    return {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)} or None


def _form_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def ok(answer: httpx.Response) -> httpx.Response:
    """The answer, read. Raises ``RequestFailed`` if it is an error."""
    if answer.is_success:
        return answer
    try:
        message = _message(answer.json())
    except ValueError:
        message = None
    raise RequestFailed(f"http {answer.status_code}", message or answer.text[:_MESSAGE_LENGTH] or answer.reason_phrase)


def _object(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        value = ok(answer).json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RequestFailed("protocol", f"the answer of {answer.url.path} is not a JSON object")
    return value


def _message(value: Any) -> str | None:
    """The message of an error in OpenAI's shape, or in that of the framework."""
    if not isinstance(value, dict):
        return None
    error = value.get("error") or value.get("detail")
    if isinstance(error, dict):
        error = error.get("message") or error
    return " ".join(str(error).split())[:_MESSAGE_LENGTH] if error else None
