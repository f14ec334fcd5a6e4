"""What this distribution contributes to Omni: the model family ``wan22``."""

from __future__ import annotations

from omni_core.plugins.declarations import Cardinality, Combination, Modality, ModelFamily, Requirements, Support
from omni_core.plugins.hookspecs import hookimpl
from omni_core.plugins.predicates import AnyOf, ClassName
from omni_plugin_wan22.family import PIPELINES


@hookimpl
def omni_requirements() -> Requirements:
    return Requirements(
        plugin_api="1.0",
        ranges={
            "omni-core": ">=0.1,<0.2",
            "vllm": ">=0.32,<0.34",
            "diffusers": ">=0.40,<0.43",
            "transformers": ">=5.10,<6",
        },
    )


@hookimpl
def omni_model_families() -> list[ModelFamily]:
    return [
        ModelFamily(
            name="wan22",
            matches=AnyOf(*(ClassName(name) for name in PIPELINES)),
            inputs=(Cardinality(Modality.TEXT), Cardinality(Modality.IMAGE, 0, 2)),
            outputs=(Cardinality(Modality.VIDEO),),
            pipeline="omni_plugin_wan22.family:pipeline",
            request="omni_plugin_wan22.request:request",
            combinations=(
                Combination(frozenset({"step-batching"}), Support.VALIDATED),
                Combination(
                    frozenset({"tensor-parallel"}),
                    Support.LIMITED,
                    "checked on two CPU ranks (T2V and I2V A14B, TI2V 5B); each holds text encoder and VAE whole",
                ),
            ),
        )
    ]
