"""``/v1/videos``: asynchronous jobs as OpenAI defines them, and ``/v1/videos/sync``, which answers with the file."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from omni_core.errors import OmniError
from omni_core.http.bodies import check_model, read_video_body, to_request_values
from omni_core.http.clients import until_client_leaves
from omni_core.http.declared import RANGE_HEADER, Deleted, JobPage, answers, file_answers, video_body
from omni_core.http.errors import HttpError, Route
from omni_core.http.files import FileAnswer
from omni_core.http.images import Fetch, fetch_images, image_fields, with_placeholders
from omni_core.http.jobs import JobStore, VideoJob, new_job_id
from omni_core.media import encode_mp4
from omni_core.requests import VideoRequest
from omni_core.runtime import Progress, Slot, VideoEngine, VideoOutput

MP4 = "video/mp4"
HEADERS = ("X-Request-Id", "X-Seed", "X-Inference-Time-S")
"""Of the answer of ``/v1/videos/sync``."""


class VideoService:
    """The video endpoints of one served model.

    Args:
        engine: what generates.
        store: where jobs are kept.
        models: the names under which the model is served; the first is the one that jobs show.
        fetch: fetches images by URL.
    """

    def __init__(self, engine: VideoEngine, store: JobStore, models: list[str], fetch: Fetch) -> None:
        self.engine = engine
        self.fetch = fetch
        self.store = store
        self.models = models
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def read(self, request: Request) -> tuple[VideoRequest, Slot]:
        """Validate the body of a request and take a place for it."""
        request_model = self.engine.request_model
        fields, typed = await read_video_body(request, request_model)
        check_model(fields, self.models)
        values = to_request_values(fields, request_model)
        parsed = self.engine.parse(with_placeholders(values, request_model), strict=typed)
        if image_fields(request_model):
            values = await fetch_images({**values, "seed": parsed.seed}, request_model, self.fetch)
            parsed = await asyncio.to_thread(self.engine.parse, values, strict=typed)  # it reads uploads
        return parsed, self.engine.admit()

    def submit(self, request: VideoRequest, slot: Slot) -> VideoJob:
        """Make a job of a validated request and start it."""
        assert request.seed is not None
        job = VideoJob(
            id=new_job_id(),
            model=self.models[0],
            prompt=request.prompt,
            size=f"{request.width}x{request.height}",
            seconds=f"{request.num_frames / request.fps:g}",
            seed=request.seed,
            created_at=int(time.time()),
        )
        try:
            self.store.put(job)
        except BaseException:
            slot.release()
            raise
        task = asyncio.create_task(self._run(job.id, request, slot), name=job.id)
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._ended(job.id, slot))
        return job

    def _ended(self, job_id: str, slot: Slot) -> None:
        self._tasks.pop(job_id, None)
        slot.release()  # only now that the file is written

    async def _run(self, job_id: str, request: VideoRequest, slot: Slot) -> None:
        try:
            output = await self.engine.generate(
                request, progress=lambda p: self._progress(job_id, p), request_id=job_id, slot=slot
            )
            begin = time.perf_counter()
            await write_mp4(output, self.store.partial_file(job_id))
            self.store.complete(job_id, {**output.seconds, "file": time.perf_counter() - begin})
        except OmniError as error:
            self.store.fail(job_id, type(error).__name__, str(error))
        except Exception as error:  # a job must end, whatever happens
            self.store.fail(job_id, "InternalError", f"{type(error).__name__}: {error}")

    def _progress(self, job_id: str, progress: Progress) -> None:
        job = self.store.get(job_id)
        if job is not None and progress.phase != "waiting":
            self.store.put(replace(job, status="in_progress", progress=progress.percent))

    async def delete(self, job: VideoJob) -> None:
        """Abort a job's work, if it is under way, and forget it."""
        if (task := self._tasks.get(job.id)) is not None:
            task.cancel()
            await asyncio.wait([task])
        self.store.delete(job.id)

    async def close(self) -> None:
        """Abort everything that is under way, and mark it as failed."""
        tasks = list(self._tasks.items())
        for _, task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait([task for _, task in tasks])
        for job_id, _ in tasks:
            if (job := self.store.get(job_id)) is not None and not job.ended:
                self.store.fail(job_id, "server_stopped", "the server was stopped before this video was done")


async def write_mp4(output: VideoOutput, path: Path) -> None:
    """Encode ``output`` to ``path`` in a thread. If the task is cancelled meanwhile, the file is removed."""
    encoding = asyncio.get_running_loop().run_in_executor(None, encode_mp4, output.frames, output.fps, path)
    try:
        await asyncio.shield(encoding)
    except asyncio.CancelledError:  # the thread cannot be stopped: clean up behind it

        def clean_up(done: asyncio.Future[None]) -> None:
            done.exception()
            path.unlink(missing_ok=True)

        encoding.add_done_callback(clean_up)
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def video_router(service: VideoService) -> APIRouter:
    """The routes of ``service``."""
    router = APIRouter(tags=["videos"], route_class=Route)
    body = video_body(service.engine.request_model, service.models)

    def find(job_id: str) -> VideoJob:
        if (job := service.store.get(job_id)) is None:
            raise HttpError(404, f"there is no video {job_id!r}", "video_id")
        return job

    @router.post("/v1/videos", openapi_extra=body, responses=answers(VideoJob, 400, 404, 413, 429, 503))
    async def create_video(request: Request) -> Response:
        """Start a video job."""
        return JSONResponse(service.submit(*await service.read(request)).to_json())

    @router.post(
        "/v1/videos/sync",
        openapi_extra=body,
        response_class=Response,
        responses=file_answers(MP4, 400, 404, 413, 429, 500, 503, headers=HEADERS),
    )
    async def create_video_sync(request: Request) -> Response:
        """Generate a video and answer with the file."""
        parsed, slot = await service.read(request)
        begin = time.perf_counter()
        try:
            output = await until_client_leaves(request.receive, service.engine.generate(parsed, slot=slot))
        finally:
            slot.release()  # the work did, unless it was cancelled before it began
        return await _file_answer(output, time.perf_counter() - begin, service.store.passing_file())

    @router.get("/v1/videos", responses=answers(JobPage, 400))
    async def list_videos(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """List jobs, a page at a time."""
        return JSONResponse(_page(service.store.list(), limit, after, order))

    @router.get("/v1/videos/{video_id}", responses=answers(VideoJob, 404))
    async def get_video(video_id: str) -> Response:
        """A job, with its status and progress."""
        return JSONResponse(find(video_id).to_json())

    @router.delete("/v1/videos/{video_id}", responses=answers(Deleted, 404))
    async def delete_video(video_id: str) -> Response:
        """Forget a job; abort its work if it is under way."""
        await service.delete(find(video_id))
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})

    @router.get(
        "/v1/videos/{video_id}/content",
        response_class=Response,
        openapi_extra=RANGE_HEADER,
        responses=file_answers(MP4, 400, 404, 409, 416, ranges=True),
    )
    async def get_video_content(video_id: str, variant: Literal["video"] = "video") -> Response:
        """The finished file."""
        job = find(video_id)
        if job.status != "completed":
            reason = f": {job.error['message']}" if job.error else f", progress {job.progress}%"
            raise HttpError(409, f"video {video_id} is {job.status}{reason}", "video_id")
        path = service.store.begin_reading(video_id)
        done = partial(service.store.end_reading, video_id)
        return FileAnswer(path, media_type=MP4, filename=f"{video_id}.mp4", done=done)

    return router


async def _file_answer(output: VideoOutput, elapsed: float, path: Path) -> Response:
    """The video as a file that is written to ``path``, and removed once it is sent."""
    await write_mp4(output, path)
    values = (output.request_id, str(output.request.seed), f"{elapsed:.3f}")
    headers = dict(zip(HEADERS, values, strict=True))
    return FileAnswer(path, media_type=MP4, headers=headers, done=partial(path.unlink, missing_ok=True))


def _page(jobs: list[VideoJob], limit: int, after: str | None, order: str) -> dict[str, Any]:
    if order == "desc":
        jobs = jobs[::-1]
    if after is not None:
        position = next((index for index, job in enumerate(jobs) if job.id == after), None)
        if position is None:
            raise HttpError(400, f"after={after!r} is not a video of this server", "after")
        jobs = jobs[position + 1 :]
    page = jobs[:limit]
    return {
        "object": "list",
        "data": [job.to_json() for job in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(jobs) > limit,
    }
