"""Errors as HTTP answers, in the shape that OpenAI's clients and vLLM's own routes use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from omni_core.errors import ConfigError, GenerationCancelled, OmniError, QueueFull, RequestError, StageUnavailable

logger = logging.getLogger(__name__)

ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    416: "RangeNotSatisfiableError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
"""``type`` of an error, as OpenAI's clients see it, by status code."""


class HttpError(Exception):
    """An answer other than 2xx, decided in a route."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def error_response(error: Exception) -> JSONResponse:
    """The answer for an error: 4xx where the client can mend it, 5xx otherwise; never an empty message."""
    retry = getattr(error, "retry_after", None)
    body = error_body(error)
    return JSONResponse(
        {"error": body}, status_code=body["code"], headers={} if retry is None else {"Retry-After": str(retry)}
    )


def error_body(error: Exception) -> dict[str, Any]:
    """What clients are told of an error; ``code`` is the status of the answer."""
    param = None
    if isinstance(error, HttpError):
        status, param = error.status, error.param
    elif isinstance(error, RequestError):
        status, param = 400, error.param
    elif isinstance(error, ConfigError):
        status = 400
    elif isinstance(error, QueueFull):
        status = 429
    elif isinstance(error, StageUnavailable | GenerationCancelled):
        status = 503
    else:
        status = 500
    message = str(error) if isinstance(error, OmniError | HttpError) else f"{type(error).__name__}: {error}"
    return {"message": message, "type": ERROR_TYPES[status], "param": param, "code": status}


class Route(APIRoute):
    """A route that turns whatever its handler raises into an answer in the OpenAI error shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with its errors answered."""
        handler = super().get_route_handler()

        async def answering(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestValidationError as error:  # a parameter of path or query
                first = error.errors()[0]
                name = str(first["loc"][-1])
                shown = f"{first['input']!r:.80}"
                return error_response(RequestError(f"{name}={shown}: {first['msg']}", name))
            except (OmniError, HttpError) as error:
                return error_response(error)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                logger.exception("%s failed", self.name)
                return error_response(error)

        return answering
