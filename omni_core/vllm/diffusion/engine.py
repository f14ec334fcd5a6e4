"""A diffusion stage as a client: vLLM's engine with the core's scheduler and a platform's worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from omni_core.config.model import VLLM_DEFAULT, Resolved
from omni_core.diffusion.messages import Job, Report, StageSettings
from omni_core.diffusion.results import ResultFolder
from omni_core.errors import ConfigError, EngineDied, GenerationCancelled, StageStartError
from omni_core.pipeline import DiffusionStage
from omni_core.plugins.manager import get_manager
from omni_core.vllm.diffusion.config import CONFIG_FORMAT
from omni_core.vllm.engine import VllmEngine

SCHEDULER = "omni_core.vllm.diffusion.scheduler.DiffusionScheduler"
UNI_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class DiffusionEngine(VllmEngine):
    """One diffusion stage: its processes, its results, its requests."""

    def __init__(self, resolved: Resolved) -> None:
        stage = resolved.stage.stage.name
        self.results = ResultFolder()
        try:
            super().__init__(stage, resolved, engine_arguments(resolved, str(self.results.path)))
        except Exception as error:
            reason = self.results.failure()
            self.results.close()
            if reason is not None:
                raise StageStartError(f"stage {stage!r} cannot start: {reason}") from error
            raise
        except BaseException:
            self.results.close()
            raise

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

    def close(self) -> None:
        """Stop the processes and remove the results. Closing twice is fine."""
        super().close()
        self.results.close()


def engine_arguments(resolved: Resolved, results: str) -> dict[str, Any]:
    """The engine arguments of a resolved diffusion stage: what was configured, and what the core fixes."""
    config = resolved.stage
    assert isinstance(config.stage, DiffusionStage) and config.attention_backend is not None
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
