"""Starting the stages of a pipeline, each of its kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from vllm.platforms import current_platform

from omni_core.config.model import Resolved, StageConfig
from omni_core.module.client import ModuleEngine
from omni_core.module.process import ModuleSettings
from omni_core.pipeline import DiffusionStage, ModuleStage, Stage, TalkerStage
from omni_core.plugins.declarations import load_reference
from omni_core.stages import SupervisedDiffusion, SupervisedModule, SupervisedTalker
from omni_core.supervisor import SupervisedStage
from omni_core.vllm.ar.engine import TalkerEngine
from omni_core.vllm.diffusion.engine import DiffusionEngine


def start_stages(resolved: Resolved, stack: ExitStack) -> dict[str, SupervisedStage[Any]]:
    """Start every stage of the pipeline; by name, the front one first. ``stack`` stops them.

    Module stages start while vLLM's engines do, of which one starts after the other: an engine measures the memory
    that is left when it starts.
    """

    def start(stage: Stage) -> SupervisedStage[Any]:
        supervised = _start(resolved, resolved.stages[stage.name])
        stack.callback(supervised.close)
        return supervised

    stages = resolved.pipeline.stages
    modules = [stage for stage in stages if isinstance(stage, ModuleStage)]
    pool = ThreadPoolExecutor(max(1, len(modules)), thread_name_prefix="omni-start")
    # Its threads live as long as the stages: a child process ends with the thread that started it. What starts while
    # another stage fails is stopped behind this.
    stack.callback(pool.shutdown)
    starting = {stage.name: pool.submit(start, stage) for stage in modules}
    started = {stage.name: start(stage) for stage in stages if stage not in modules}
    started |= {name: future.result() for name, future in starting.items()}
    return {stage.name: started[stage.name] for stage in stages}


def _start(resolved: Resolved, config: StageConfig) -> SupervisedStage[Any]:
    match config.stage:
        case DiffusionStage():
            return SupervisedDiffusion(lambda: DiffusionEngine(resolved))
        case TalkerStage():
            assert resolved.family.speech is not None
            model = load_reference(resolved.family.speech)(resolved.checkpoint)
            return SupervisedTalker(lambda: TalkerEngine(resolved, config, model))
        case ModuleStage():
            settings = module_settings(resolved, config)
            return SupervisedModule(lambda: ModuleEngine(settings))


def module_settings(resolved: Resolved, config: StageConfig) -> ModuleSettings:
    """What the process of a module stage is told."""
    assert isinstance(config.stage, ModuleStage)
    values = {name: setting.value for name, setting in config.engine.items()}
    return ModuleSettings(
        stage=config.stage.name,
        module=config.stage.module,
        checkpoint=str(resolved.checkpoint.local_path()),
        device=values["device"] or current_platform.device_type,
        dtype=values["dtype"],
        options={name: setting.value for name, setting in config.options.items()},
        max_batch=values["max_batch"],
        num_threads=values["num_threads"],
    )
