"""Routes about the stages: ``/health``, which names each, and sleep and wake-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from omni_core.errors import RequestError, StageUnavailable
from omni_core.http.bodies import read_bytes
from omni_core.http.declared import HealthAnswer, StagesAnswer, answers, json_body
from omni_core.http.errors import Route
from omni_core.http.parsing import load_json
from omni_core.supervisor import SleepMode, StageState, SupervisedStage

MAX_BODY_BYTES = 64 << 10
REFUSED = (400, 413, 503)


class SleepRequest(BaseModel):
    """Body of ``/v1/omni/sleep``.

    ``stages``: which ones, all where absent. ``level``: 1, which moves weights to host memory; vLLM's level 2 drops
    them, and nothing here would load them again. ``mode``: what becomes of requests under way.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    stages: list[str] | None = None
    level: Literal[1] = 1
    mode: SleepMode = "abort"


class WakeUpRequest(BaseModel):
    """Body of ``/v1/omni/wakeup``. ``stages``: which ones, all where absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    stages: list[str] | None = None


def stage_router(stages: Mapping[str, SupervisedStage[Any]]) -> APIRouter:
    """The routes for the stages of a pipeline, by name."""
    router = APIRouter(tags=["stages"], route_class=Route)

    def statuses() -> dict[str, Any]:
        return {name: stage.status() for name, stage in stages.items()}

    @router.get("/health", responses={code: {"model": HealthAnswer} for code in (200, 503)})
    async def health() -> Response:
        """200 while every stage is up (asleep counts as up), 503 otherwise; either way with each stage's state."""
        healthy = all(stage.state in (StageState.RUNNING, StageState.ASLEEP) for stage in stages.values())
        body = {"status": "ok" if healthy else "unhealthy", "stages": statuses()}
        if healthy:
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={"Retry-After": str(StageUnavailable.retry_after)})

    @router.post("/v1/omni/sleep", openapi_extra=json_body(SleepRequest), responses=answers(StagesAnswer, *REFUSED))
    async def sleep(request: Request) -> Response:
        """Free the device memory of stages."""
        wanted = await _read(request, SleepRequest)
        named = _named(wanted.stages, stages)
        for stage in named:  # before any of them sleeps
            stage.check_sleep(wanted.level)
        for stage in named:
            await stage.sleep(wanted.level, wanted.mode)
        return JSONResponse({"stages": statuses()})

    @router.post("/v1/omni/wakeup", openapi_extra=json_body(WakeUpRequest), responses=answers(StagesAnswer, *REFUSED))
    async def wake_up(request: Request) -> Response:
        """Bring stages back."""
        wanted = await _read(request, WakeUpRequest)
        for stage in reversed(_named(wanted.stages, stages)):  # the front one last, which takes the requests
            await stage.wake_up()
        return JSONResponse({"stages": statuses()})

    return router


async def _read(request: Request, model: type[Any]) -> Any:
    raw = await read_bytes(request, MAX_BODY_BYTES)
    try:
        return model.model_validate(load_json(raw) if raw.strip() else {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        raise RequestError(f"{name or 'body'}: {first['msg']}", name) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _named(names: list[str] | None, stages: Mapping[str, SupervisedStage[Any]]) -> list[SupervisedStage[Any]]:
    """The stages of these names, all of them for ``None``."""
    for name in names or ():
        if name not in stages:
            raise RequestError(f"there is no stage {name!r:.80}; this server has {', '.join(stages)}", "stages")
    return [stage for name, stage in stages.items() if names is None or name in names]
