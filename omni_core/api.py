"""The Python API: ``Omni`` and its asynchronous twin. Same resolution and same validation as ``omni serve``."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from omni_core.audio import read_sound
from omni_core.config.startup import check_versions
from omni_core.diffusion.messages import FrameType
from omni_core.errors import ConfigError, RequestError, StageUnavailable
from omni_core.pipeline import DiffusionStage
from omni_core.requests import VideoRequest, unknown_parameter
from omni_core.runtime import ProgressCallback, VideoEngine, VideoOutput
from omni_core.speech.engine import Sound, SpeechEngine, SpeechOutput
from omni_core.speech.requests import SET_BY_THE_SERVER, SpeechRequest

__all__ = ["AsyncOmni", "Omni", "Sound", "SpeechOutput", "VideoOutput"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
RequestT = TypeVar("RequestT", VideoRequest, SpeechRequest)


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

    A model either makes videos or speaks; the methods of the other kind raise ``ConfigError``.
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
        from omni_core.vllm.server import speech_engine, video_engine
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
        make = video_engine if isinstance(self.resolved.pipeline.stage, DiffusionStage) else speech_engine
        with ExitStack() as stack:
            self.engine: VideoEngine | SpeechEngine = make(self.resolved, start_stages(self.resolved, stack))
            self._stack = stack.pop_all()

    @property
    def video(self) -> VideoEngine:
        """The front end of a model that makes videos. Raises ``ConfigError`` for another model."""
        if not isinstance(self.engine, VideoEngine):
            raise ConfigError(f"{self.resolved.model} speaks and makes no videos: use speak")
        return self.engine

    @property
    def speech(self) -> SpeechEngine:
        """The front end of a model that speaks. Raises ``ConfigError`` for another model."""
        if not isinstance(self.engine, SpeechEngine):
            raise ConfigError(f"{self.resolved.model} makes videos and does not speak: use generate")
        return self.engine

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
        request = self.video.parse({"prompt": prompt, **parameters})
        return await self.video.generate(request, frame_type=frame_type, progress=progress)

    async def speak(self, text: str, **parameters: Any) -> SpeechOutput:
        """Say ``text``. ``parameters`` are the fields of the model's request, such as ``voice``.

        ``ref_audio``, for models that clone voices, is a file of sound: its bytes or its path. Cancelling the task
        aborts the work. Raises ``RequestError``, ``QueueFull`` or ``GenerationError``.
        """
        return await self.speech.whole(_speech_request(self.speech, {"input": text, **parameters}))

    def stream_speech(self, text: str, **parameters: Any) -> AsyncIterator[Sound]:
        """Say ``text``, in pieces while it is made, which joined are what ``speak`` gives.

        The last piece has a ``finish_reason``, and may have no samples. The request is validated at once, and begins
        with the first piece that is asked for. Closing the iterator aborts the work. Raises as ``speak`` does.
        """
        return self.speech.generate(_speech_request(self.speech, {"input": text, **parameters}))

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
            engine = self._omni.video
            parsed = [engine.parse(request) for request in requests]
            return await _all(
                lambda request: engine.generate(request, frame_type=frame_type), parsed, at_once=engine.capacity
            )

        return self._run(work())

    def speak(self, text: str, **parameters: Any) -> SpeechOutput:
        """Say ``text``. See ``AsyncOmni.speak``."""
        return self._run(self._omni.speak(text, **parameters))

    def speak_many(self, requests: Sequence[Mapping[str, Any]]) -> list[SpeechOutput]:
        """Say several texts at once, batched by the engine; each mapping holds the fields of one request.

        All requests are validated before the first is started.
        """

        async def work() -> list[SpeechOutput]:
            engine = self._omni.speech
            parsed = [_speech_request(engine, request) for request in requests]
            return await _all(engine.whole, parsed, at_once=engine.capacity)

        return self._run(work())

    def stream_speech(self, text: str, **parameters: Any) -> Iterator[Sound]:
        """Say ``text``, in pieces while it is made. Leaving the loop over them aborts the work.

        See ``AsyncOmni.stream_speech``.
        """
        return self._drain(self._omni.stream_speech(text, **parameters))

    def _drain(self, sounds: AsyncIterator[Sound]) -> Iterator[Sound]:
        turn = asyncio.Lock()  # closing comes after a piece whose wait was interrupted

        async def following() -> Sound | None:
            async with turn:
                return await anext(sounds, None)

        async def close() -> None:
            async with turn, aclosing(sounds):  # type: ignore[type-var]
                pass

        try:
            while (sound := self._run(following())) is not None:
                yield sound
        finally:
            if not self._loop.is_closed():
                self._run(close())

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


def _speech_request(engine: SpeechEngine, fields: Mapping[str, Any]) -> SpeechRequest:
    """The request that ``fields`` ask for, its sound read. Raises ``RequestError``."""
    known = [*(name for name in engine.request_model.model_fields if name not in SET_BY_THE_SERVER), "ref_audio"]
    for name in fields:
        if name not in known:
            raise RequestError(unknown_parameter(name, known), name)
    values = {name: value for name, value in fields.items() if name != "ref_audio"}
    sound = fields.get("ref_audio")
    if sound is None:
        return engine.parse(values)
    if not isinstance(sound, bytes | str | Path):
        raise RequestError("ref_audio must be a file of sound: its bytes or its path", "ref_audio")
    try:
        data = sound if isinstance(sound, bytes) else Path(sound).read_bytes()
        values["reference"] = read_sound(data, engine.model.sample_rate)
    except (OSError, RequestError) as error:
        raise RequestError(f"ref_audio: {error}", "ref_audio") from None
    return engine.parse(values)


async def _all(work: Callable[[RequestT], Awaitable[T]], requests: Sequence[RequestT], *, at_once: int) -> list[T]:
    """What ``work`` gives for each of ``requests``; the first failure ends the others."""
    room = asyncio.Semaphore(at_once)

    async def one(request: RequestT) -> T:
        async with room:
            return await work(request)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _cancel_others() -> None:
    """Cancel every other task of the running loop and wait for it, so that the loop can be closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
