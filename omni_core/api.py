"""The Python API: ``Omni`` and its asynchronous twin. Same resolution and same validation as ``omni serve``."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from omni_core.config.startup import check_versions
from omni_core.diffusion.messages import FrameType
from omni_core.errors import ConfigError, StageUnavailable
from omni_core.pipeline import DiffusionStage
from omni_core.requests import VideoRequest
from omni_core.runtime import ProgressCallback, VideoEngine, VideoOutput

__all__ = ["AsyncOmni", "Omni", "VideoOutput"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncOmni:
    """A model, loaded in engine processes of its own, for use on an event loop.

    Args:
        model: local folder or hub id of a checkpoint.
        deploy: a deploy file (YAML).
        overrides: ``{"stage.key": value}``, as ``--set`` on the command line.
        allow_version_mismatch: let plugins through whose version ranges do not admit what is installed.
        engine: engine arguments by vLLM's names (``max_num_seqs=4``), as flags on the command line.

    Construction blocks until the model is loaded. Raises ``OmniError`` for anything that is wrong with the arguments,
    the checkpoint or the plugins.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        deploy: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        allow_version_mismatch: bool = False,
        **engine: Any,
    ) -> None:
        check_versions(allow_version_mismatch=allow_version_mismatch)  # before vLLM is imported
        from omni_core.vllm.arguments import resolve_for_api
        from omni_core.vllm.server import video_engine
        from omni_core.vllm.stages import start_stages

        self.resolved = resolve_for_api(
            str(model),
            deploy=deploy,
            overrides=overrides or {},
            allow_version_mismatch=allow_version_mismatch,
            engine=engine,
        )
        for warning in self.resolved.warnings:
            logger.warning("%s", warning)
        if not isinstance(self.resolved.pipeline.stage, DiffusionStage):
            raise ConfigError(f"the Python API makes videos; serve {model} with `omni serve` for speech")
        self._stack = ExitStack()
        self.engine: VideoEngine = video_engine(self.resolved, start_stages(self.resolved, self._stack))

    async def generate(
        self,
        prompt: str,
        *,
        frame_type: FrameType = "uint8",
        progress: ProgressCallback | None = None,
        **parameters: Any,
    ) -> VideoOutput:
        """Generate a video. ``parameters`` are the fields of the model's request, such as ``num_frames``.

        Cancelling the task aborts the work. Raises ``RequestError``, ``QueueFull`` or ``GenerationError``.
        """
        request = self.engine.parse({"prompt": prompt, **parameters})
        return await self.engine.generate(request, frame_type=frame_type, progress=progress)

    def close(self) -> None:
        """Stop the engine processes. Closing twice is fine."""
        self._stack.close()

    async def __aenter__(self) -> AsyncOmni:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class Omni:
    """A model, loaded in engine processes of its own. See ``AsyncOmni`` for the arguments.

    Use it as a context manager, or call ``close``. As with vLLM, a script that makes one must guard its top level
    with ``if __name__ == "__main__":``, since the engine's processes are spawned.
    """

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni", daemon=True)
        self._thread.start()
        try:
            self._omni = self._run(self._make(model, arguments))
        except BaseException:
            self._stop_loop()
            raise

    @staticmethod
    async def _make(model: str | Path, arguments: Mapping[str, Any]) -> AsyncOmni:
        return AsyncOmni(model, **arguments)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise StageUnavailable("this Omni is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def generate(
        self,
        prompt: str,
        *,
        frame_type: FrameType = "uint8",
        progress: ProgressCallback | None = None,
        **parameters: Any,
    ) -> VideoOutput:
        """Generate a video; ``progress`` is called from another thread. See ``AsyncOmni.generate``."""
        return self._run(self._omni.generate(prompt, frame_type=frame_type, progress=progress, **parameters))

    def generate_many(
        self, requests: Sequence[Mapping[str, Any]], *, frame_type: FrameType = "uint8"
    ) -> list[VideoOutput]:
        """Generate several videos at once, batched by the engine; each mapping holds the fields of one request.

        All requests are validated before the first is started.
        """

        async def work() -> list[VideoOutput]:
            engine = self._omni.engine
            parsed = [engine.parse(request) for request in requests]
            room = asyncio.Semaphore(engine.capacity)

            async def one(request: VideoRequest) -> VideoOutput:
                async with room:
                    return await engine.generate(request, frame_type=frame_type)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(request)) for request in parsed]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return self._run(work())

    def close(self) -> None:
        """Stop the engine processes. Closing twice is fine."""
        if self._thread.is_alive():
            self._omni.close()
            self._stop_loop()

    def _stop_loop(self) -> None:
        self._run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Omni:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _cancel_others() -> None:
    """Cancel every other task of the running loop and wait for it, so that the loop can be closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
