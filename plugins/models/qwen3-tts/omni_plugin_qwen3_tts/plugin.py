"""What this distribution contributes to Omni: the model family ``qwen3-tts``."""

from __future__ import annotations

from omni_core.plugins.declarations import Cardinality, Modality, ModelFamily, Requirements
from omni_core.plugins.hookspecs import hookimpl
from omni_core.plugins.predicates import ModelType


@hookimpl
def omni_requirements() -> Requirements:
    return Requirements(
        plugin_api="1.0",
        ranges={
            "omni-core": ">=0.1,<0.2",
            "omni-speech-codec": ">=0.1,<0.2",
            "vllm": ">=0.32,<0.34",
            "transformers": ">=5.10,<6",
        },
    )


@hookimpl
def omni_model_families() -> list[ModelFamily]:
    return [
        ModelFamily(
            name="qwen3-tts",
            matches=ModelType("qwen3_tts"),
            inputs=(Cardinality(Modality.TEXT), Cardinality(Modality.AUDIO, 0, 1)),
            outputs=(Cardinality(Modality.AUDIO),),
            pipeline="omni_plugin_qwen3_tts.family:pipeline",
            request="omni_plugin_qwen3_tts.family:request",
            speech="omni_plugin_qwen3_tts.family:speech",
        )
    ]


@hookimpl
def omni_activate() -> None:
    from vllm import ModelRegistry

    from omni_plugin_qwen3_tts import config

    config.register()
    if "Qwen3TTSTalkerForConditionalGeneration" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(
            "Qwen3TTSTalkerForConditionalGeneration", "omni_plugin_qwen3_tts.talker:Qwen3TTSTalker"
        )
