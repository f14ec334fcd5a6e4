"""A diffusion stage as a client: stock ``AsyncLLM`` with the core's scheduler and a platform's worker."""

from __future__ import annotations

import asyncio
import multiprocessing.process
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.async_utils import cancel_task_threadsafe
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from omni_core.config.model import VLLM_DEFAULT, Resolved
from omni_core.diffusion.messages import Job, Report, StageSettings
from omni_core.diffusion.results import ResultFolder
from omni_core.errors import ConfigError, EngineDied, GenerationCancelled, StageStartError
from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, get_manager
from omni_core.supervisor import SleepMode
from omni_core.vllm.activate import activate
from omni_core.vllm.diffusion.config import CONFIG_FORMAT

logger = init_logger(__name__)

SCHEDULER = "omni_core.vllm.diffusion.scheduler.DiffusionScheduler"
UNI_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class DiffusionEngine:
    """One diffusion stage: its processes, its results, its requests.

    Construction starts the processes and loads the weights; it takes as long as that takes.
    """

    def __init__(self, resolved: Resolved) -> None:
        self.stage = resolved.stage.stage.name
        self.results = ResultFolder()
        self._processes: set[multiprocessing.process.BaseProcess] = set()
        self._unwatch: Callable[[], object] = lambda: None
        try:
            self.client = self._start(resolved)
        except Exception as error:
            reason = self.results.failure()
            self.results.close()
            if reason is not None:
                raise StageStartError(f"stage {self.stage!r} cannot start: {reason}") from error
            raise
        except BaseException:
            self.results.close()
            raise

    def _start(self, resolved: Resolved) -> AsyncLLM:
        for name, value in resolved.platform.environment.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # vLLM forks by default, which threads forbid
        get_manager().require(resolved.family, resolved.platform)
        activate()
        arguments = engine_arguments(resolved, str(self.results.path))
        before = set(multiprocessing.active_children())
        with _plugin_set_in_environment():
            try:
                engine_args = AsyncEngineArgs(**arguments)
                config = engine_args.create_engine_config()
                if engine_args.async_scheduling is not None:  # on CPUs vLLM turns it off even where it was asked for
                    config.scheduler_config.async_scheduling = engine_args.async_scheduling
            except ValueError as error:  # pydantic's is one
                reason = " ".join(str(error).split())
                raise ConfigError(f"vLLM refuses the configuration of stage {self.stage!r}: {reason}") from None
            client: AsyncLLM = AsyncLLM.from_vllm_config(
                config,
                enable_log_requests=engine_args.enable_log_requests,
                disable_log_stats=engine_args.disable_log_stats,
            )
        self._processes = set(multiprocessing.active_children()) - before
        return client

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call ``on_death`` on the running loop, once, when one of the engine's processes has ended."""
        loop = asyncio.get_running_loop()
        sentinels = [process.sentinel for process in self._processes]

        def unwatch() -> None:
            for sentinel in sentinels:
                loop.remove_reader(sentinel)

        def ended() -> None:
            unwatch()
            on_death()

        for sentinel in sentinels:
            loop.add_reader(sentinel, ended)
        self._unwatch = lambda: None if loop.is_closed() else loop.call_soon_threadsafe(unwatch)

    @property
    def max_running(self) -> int:
        """How many requests take part in an engine step."""
        return int(self.client.vllm_config.scheduler_config.max_num_seqs)

    async def generate(self, job: Job, request_id: str) -> AsyncIterator[Report]:
        """Reports on a request, the last one with ``done``; reports coalesce where the caller is slow.

        Closing the iterator early, or cancelling the task that reads it, aborts the request in the engine.

        Raises:
            GenerationCancelled: the engine aborted the request.
            EngineDied: the stage died.
        """
        parameters = SamplingParams(
            max_tokens=1 << 15,  # the worker says when a request is done
            temperature=0.0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=job.to_extra_args(),
        )
        try:
            async with aclosing(self.client.generate(tokens_input([0]), parameters, request_id)) as outputs:
                async for output in outputs:
                    if output.kv_transfer_params is not None:
                        report = Report(**output.kv_transfer_params)
                        yield report
                        if report.done:
                            return
                    elif output.finished:
                        raise GenerationCancelled(f"stage {self.stage!r} aborted request {request_id}")
        except EngineDeadError as error:
            raise EngineDied(f"stage {self.stage!r} died while request {request_id} was in it") from error

    def take(self, report: Report) -> npt.NDArray[np.generic]:
        """The frames that ``report`` points to; they can be taken once."""
        assert report.result is not None
        return self.results.take(report.result)

    def discard(self, request_id: str) -> None:
        """Drop whatever result a request left that nobody will take."""
        self.results.discard(request_id)

    async def stats(self, reset: bool = False) -> Mapping[str, Any]:
        """Counters of the first worker, see ``DiffusionWorkerMixin.omni_stats``."""
        values: list[Mapping[str, Any]] = await self.client.collective_rpc("omni_stats", args=(reset,))
        return values[0]

    def check_available(self) -> None:
        """Raise ``EngineDied`` if the engine is dead."""
        if self.client.errored:
            raise EngineDied(f"stage {self.stage!r} is dead")

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """vLLM's sleep mode: with level 1 the weights go to host memory.

        ``mode``: ``abort`` the requests under way, or ``wait`` for their end.

        Raises:
            ConfigError: the stage was not started with ``enable_sleep_mode``.
        """
        if not self.client.vllm_config.model_config.enable_sleep_mode:
            raise ConfigError(f"stage {self.stage!r} cannot sleep: start it with --enable-sleep-mode")
        await self.client.sleep(level, mode)

    async def wake_up(self) -> None:
        """Undo ``sleep``."""
        await self.client.wake_up()
        await self.client.resume_generation()

    def close(self) -> None:
        """Stop the processes and remove the results. Closing twice is fine."""
        client: AsyncLLM | None = self.__dict__.pop("client", None)  # gone, so that it is not shut down twice
        if client is None:
            return
        self._unwatch()
        if (handler := getattr(client, "output_handler", None)) is not None:
            cancel_task_threadsafe(handler)  # or it would log the end of the engine as an error
        client.shutdown()
        self.results.close()


def engine_arguments(resolved: Resolved, results: str) -> dict[str, Any]:
    """The engine arguments of a resolved diffusion stage: what was configured, and what the core fixes."""
    config = resolved.stage
    configured = {name: s.value for name, s in config.engine.items() if s.source != VLLM_DEFAULT}
    ranks = configured.get("tensor_parallel_size", 1)
    if configured.get("distributed_executor_backend") == "ray" and not current_platform.ray_device_key:
        device = current_platform.device_type
        raise ConfigError(
            f"stage {config.stage.name!r} cannot run its workers on Ray: vLLM schedules them by a resource of the "
            f"device, and its platform {device!r} names none; use --distributed-executor-backend mp"
        )
    if configured.get("distributed_executor_backend", "uni" if ranks == 1 else None) == "uni":
        # One rank needs no process of its own. By its name some platforms turn "uni" into "mp"; by its class it is
        # what was asked for.
        configured["distributed_executor_backend"] = UNI_EXECUTOR
    backend = config.attention_backend.value
    attention = resolved.platform.attention
    if backend is not None:
        attention = get_manager().attention_backend(backend, resolved.platform.device_type).function
    settings = StageSettings(
        stage=config.stage.name,
        family=resolved.family.name,
        model=config.stage.model,
        attention=attention,
        request=resolved.family.request,
        results=results,
        options={name: setting.value for name, setting in config.options.items()},
        compile=not configured.get("enforce_eager", False),
    )
    module, _, name = resolved.platform.diffusion_worker.partition(":")
    path = str(resolved.checkpoint.local_path())
    return {
        **configured,
        "model": path,
        "served_model_name": configured.get("served_model_name") or [resolved.model],
        "config_format": CONFIG_FORMAT,
        "skip_tokenizer_init": True,
        "scheduler_cls": SCHEDULER,
        "worker_cls": f"{module}.{name}",
        "enable_prefix_caching": False,
        "enforce_eager": True,  # of vLLM's own compilation and graphs; the model compiles its blocks itself
        "additional_config": settings.to_config(),
    }


@contextmanager
def _plugin_set_in_environment() -> Iterator[None]:
    """Hand the plugin set to the processes that start meanwhile, and to no later ones."""
    before = os.environ.get(PLUGIN_SET_VARIABLE)
    os.environ[PLUGIN_SET_VARIABLE] = get_manager().plugin_set.to_json()
    try:
        yield
    finally:
        if before is None:
            del os.environ[PLUGIN_SET_VARIABLE]
        else:
            os.environ[PLUGIN_SET_VARIABLE] = before
