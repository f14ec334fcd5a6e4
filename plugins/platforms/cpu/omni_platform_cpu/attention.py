"""Attention on CPU: PyTorch's fused scaled dot-product attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """See ``omni_core.diffusion.contract.Attention``; every floating dtype and head size."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)
