"""What this distribution contributes to Omni: the model family ``noise``."""

from omni_core.plugins.declarations import Cardinality, Modality, ModelFamily, Requirements
from omni_core.plugins.hookspecs import hookimpl
from omni_core.plugins.predicates import ClassName


@hookimpl
def omni_requirements():
    return Requirements(plugin_api="1.0", ranges={"omni-core": ">=0.1,<0.2", "vllm": ">=0.32,<0.34"})


@hookimpl
def omni_model_families():
    return [
        ModelFamily(
            name="noise",
            matches=ClassName("NoisePipeline"),
            inputs=(Cardinality(Modality.TEXT),),
            outputs=(Cardinality(Modality.VIDEO),),
            pipeline="omni_plugin_noise.family:pipeline",
            request="omni_plugin_noise.family:request",
        )
    ]
