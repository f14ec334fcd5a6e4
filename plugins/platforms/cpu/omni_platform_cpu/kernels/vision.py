"""Kernels of vision encoders, where a model has one in Triton and the same in PyTorch."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from omni_platform_cpu.kernels import replaces

QWEN3_VL = "vllm.model_executor.models.qwen3_vl"


@replaces(QWEN3_VL + ".triton_pos_embed_interpolate")
def pos_embed_interpolate(
    embed_weight: torch.Tensor, t: int, h: int, w: int, num_grid_per_side: int, m_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Bilinear position embeddings [t * h * w, hidden] of a grid in the order of merged patches: vLLM's in PyTorch."""
    model: Any = importlib.import_module(QWEN3_VL)
    embeddings: torch.Tensor = model.pos_embed_interpolate_native(
        embed_weight, t, h, w, num_grid_per_side, m_size, dtype
    )
    return embeddings
