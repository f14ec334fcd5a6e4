"""Where vLLM asks for its platform: Omni's CPU platform in Omni's processes, nothing in any other.

vLLM calls ``vllm_platform`` (entry-point group ``vllm.platform_plugins``) in each of its processes, the first time
that anything asks for the current platform. This module is all that a plain vLLM process imports of this
distribution.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("omni_core.platform.cpu")  # below the core's, whose messages go where vLLM's go

PLATFORM = "omni_platform_cpu.platform.OmniCpuPlatform"


def vllm_platform() -> str | None:
    """The class of the platform, for vLLM; ``None`` outside of Omni, and where vLLM would not run on a CPU anyway."""
    from omni_core.plugins.manager import in_omni_process

    if not in_omni_process():
        return None
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        return None
    from omni_platform_cpu.triton_backend import install

    install()
    return PLATFORM


def report_other_platform() -> None:
    """Say so in the log if vLLM chose its own CPU platform in this Omni process, and why it may have.

    Diffusion stages do not mind; token stages would run on Model Runner V1, which has no hooks for talkers.
    """
    platforms = sys.modules.get("vllm.platforms")
    chosen = getattr(platforms, "_current_platform", None)
    if chosen is None or not chosen.is_cpu() or f"{type(chosen).__module__}.{type(chosen).__name__}" == PLATFORM:
        return
    logger.info(
        "vLLM runs on its own CPU platform in this process, without Model Runner V2: vLLM was used before Omni was "
        "(import and use omni_core first), or VLLM_TARGET_DEVICE or VLLM_PLUGINS keeps vLLM from asking plugins"
    )
