"""Errors as HTTP answers, in the shape that OpenAI's clients and vLLM's own routes use."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from omni_core.errors import ConfigError, GenerationCancelled, OmniError, QueueFull, RequestError, StageUnavailable

logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class HttpError(Exception):
    """An answer other than 2xx, decided in a route."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def error_response(error: Exception) -> JSONResponse:
    """The answer for an error: 4xx where the client can mend it, 5xx otherwise; never an empty message."""
    headers = {}
    param = None
    if isinstance(error, HttpError):
        status, param = error.status, error.param
    elif isinstance(error, RequestError):
        status, param = 400, error.param
    elif isinstance(error, ConfigError):
        status = 400
    elif isinstance(error, QueueFull):
        status = 429
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, StageUnavailable):
        status = 503
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, GenerationCancelled):
        status = 503
    else:
        status = 500
    message = str(error) if isinstance(error, OmniError | HttpError) else f"{type(error).__name__}: {error}"
    body = {"message": message, "type": _TYPES[status], "param": param, "code": status}
    return JSONResponse({"error": body}, status_code=status, headers=headers)


Handler = Callable[..., Awaitable[Response]]


def answers_errors(handler: Handler) -> Handler:
    """Turn whatever a handler raises into an answer in the OpenAI error shape."""

    @wraps(handler)
    async def wrapped(*arguments: Any, **options: Any) -> Response:
        try:
            return await handler(*arguments, **options)
        except (OmniError, HttpError) as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            logger.exception("%s failed", handler.__name__)
            return error_response(error)

    return wrapped
