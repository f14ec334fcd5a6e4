"""What this distribution contributes to Omni: the platform ``cuda`` and attention for it."""

from __future__ import annotations

from omni_core.plugins.declarations import AttentionBackend, Platform, Requirements
from omni_core.plugins.hookspecs import hookimpl


@hookimpl
def omni_requirements() -> Requirements:
    return Requirements(plugin_api="1.0", ranges={"omni-core": ">=0.1,<0.2", "vllm": ">=0.32,<0.34"})


@hookimpl
def omni_platforms() -> list[Platform]:
    return [
        Platform(
            name="cuda",
            device_type="cuda",
            diffusion_worker="omni_platform_cuda.worker:DiffusionWorker",
            attention="omni_platform_cuda.attention:attention",
            stage_defaults={
                "diffusion": {"dtype": "bfloat16", "enforce_eager": True},
                # Talkers bring kernels of their own for decoding; what compilation gives prompts is not worth the wait.
                "talker": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
            },
            capture="omni_platform_cuda.graphs:capture",
            sample_codes="omni_platform_cuda.sampling:sample_codes",
        )
    ]


@hookimpl
def omni_attention_backends() -> list[AttentionBackend]:
    return [
        AttentionBackend(
            name="flash-attention",
            device_types=frozenset({"cuda"}),
            function="omni_platform_cuda.attention:flash_attention",
        ),
        AttentionBackend(
            name="sdpa",
            device_types=frozenset({"cuda"}),
            function="omni_platform_cuda.attention:scaled_dot_product_attention",
        ),
    ]
