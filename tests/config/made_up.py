"""Made-up engine arguments and shipped defaults: configuration is tested without vLLM."""

from dataclasses import replace
from typing import Literal

from omni_core.config import EngineArgument
from omni_core.pipeline import Pipeline

ENGINE_ARGUMENTS = {
    argument.name: argument
    for argument in (
        EngineArgument("dtype", "auto", Literal["auto", "float32", "bfloat16"]),
        EngineArgument("tensor_parallel_size", 1, int),
        EngineArgument("max_num_seqs", None, int),
        EngineArgument("gpu_memory_utilization", 0.9, float),
        EngineArgument("enable_sleep_mode", False, bool),
        EngineArgument("device_ids", None, list[int | str] | None),
        EngineArgument("distributed_executor_backend", None, str | None),
        EngineArgument("speculative_config", None, dict | None),
        EngineArgument("worker_cls", "auto", str),
        EngineArgument("enforce_eager", False, bool),
        EngineArgument("trust_remote_code", False, bool),
        EngineArgument("seed", 0, int),
        EngineArgument("revision", None, str | None),
    )
}


def shipping(served, *, family=None, platform=None, combinations=None):
    """``served`` whose family and platform ship these defaults."""
    stage = replace(served.pipeline.stage, defaults=family or {})
    shipped = replace(served.platform, stage_defaults={"diffusion": platform or {}})
    made_up = served.family if combinations is None else replace(served.family, combinations=combinations)
    return replace(served, family=made_up, platform=shipped, pipeline=Pipeline((stage,)))
