"""A stage that runs in vLLM's engine, as a client: stock ``AsyncLLM``, started, watched, put to sleep and stopped."""

from __future__ import annotations

import asyncio
import multiprocessing.process
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import psutil
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import init_logger
from vllm.utils.async_utils import cancel_task_threadsafe
from vllm.v1.engine.async_llm import AsyncLLM

from omni_core.config.model import Resolved
from omni_core.errors import ConfigError, EngineDied
from omni_core.module.client import MODULE_PROCESS
from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, get_manager
from omni_core.processes import ParentBound
from omni_core.supervisor import SleepMode
from omni_core.vllm.activate import activate

logger = init_logger(__name__)


class VllmEngine:
    """One stage in vLLM's engine: its processes and its client.

    Construction starts the processes and loads the weights; it takes as long as that takes.

    Args:
        stage: the stage's name.
        resolved: what is served.
        arguments: vLLM's engine arguments.

    Attributes:
        environment: variables of the engine's processes.
    """

    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(self, stage: str, resolved: Resolved, arguments: Mapping[str, Any]) -> None:
        self.stage = stage
        self._processes: set[multiprocessing.process.BaseProcess] = set()
        self._unwatch: Callable[[], object] = lambda: None
        self.client = self._start(resolved, arguments)

    def _start(self, resolved: Resolved, arguments: Mapping[str, Any]) -> AsyncLLM:
        for name, value in resolved.platform.environment.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # vLLM forks by default, which threads forbid
        get_manager().require(resolved.family, resolved.platform)
        activate()
        before = set(multiprocessing.active_children())
        with _in_environment({PLUGIN_SET_VARIABLE: get_manager().plugin_set.to_json(), **self.environment}):
            try:
                engine_args = AsyncEngineArgs(**arguments)
                config = engine_args.create_engine_config()
                if engine_args.async_scheduling is not None:  # on CPUs vLLM turns it off even where it was asked for
                    config.scheduler_config.async_scheduling = engine_args.async_scheduling
            except ValueError as error:  # pydantic's is one
                reason = " ".join(str(error).split())
                raise ConfigError(f"vLLM refuses the configuration of stage {self.stage!r}: {reason}") from None
            config.additional_config = ParentBound(config.additional_config)
            client: AsyncLLM = AsyncLLM.from_vllm_config(
                config,
                enable_log_requests=engine_args.enable_log_requests,
                disable_log_stats=engine_args.disable_log_stats,
            )
        started = set(multiprocessing.active_children()) - before
        self._processes = {one for one in started if not one.name.startswith(MODULE_PROCESS)}  # these start meanwhile
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

    def check_available(self) -> None:
        """Raise ``EngineDied`` if the engine is dead."""
        if self.client.errored:
            raise EngineDied(f"stage {self.stage!r} is dead")

    def check_sleep(self, level: int) -> None:
        """Raise ``ConfigError`` if the stage was not started with ``enable_sleep_mode``."""
        if not self.client.vllm_config.model_config.enable_sleep_mode:
            raise ConfigError(f"stage {self.stage!r} cannot sleep: start it with --enable-sleep-mode")

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """vLLM's sleep mode: with level 1 the weights go to host memory.

        ``mode``: ``abort`` the requests under way, or ``wait`` for their end.

        Raises:
            ConfigError: the stage was not started with ``enable_sleep_mode``.
        """
        self.check_sleep(level)
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
        with suppress(psutil.NoSuchProcess):  # vLLM looks at processes that end meanwhile
            client.shutdown()


@contextmanager
def _in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Hand variables to the processes that start meanwhile, and to no later ones."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
