"""What this distribution contributes to Omni: the platform ``cpu``."""

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
            name="cpu",
            device_type="cpu",
            diffusion_worker="omni_platform_cpu.worker:DiffusionWorker",
            attention="omni_platform_cpu.attention:attention",
            # Few CPUs multiply bfloat16 fast, and vLLM would take it from the checkpoint.
            # Compiling takes minutes there and gains little.
            stage_defaults={
                "diffusion": {"dtype": "float32", "enforce_eager": True},
                "talker": {"dtype": "float32", "enforce_eager": True},
            },
            # Diffusion has no key-value cache; vLLM's CPU worker would set half of the memory aside for one.
            environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    ]


@hookimpl
def omni_attention_backends() -> list[AttentionBackend]:
    return [
        AttentionBackend(name="sdpa", device_types=frozenset({"cpu"}), function="omni_platform_cpu.attention:attention")
    ]


@hookimpl
def omni_activate() -> None:
    from omni_platform_cpu.entry import report_other_platform

    report_other_platform()
