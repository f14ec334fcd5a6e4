"""Attention on CUDA devices: the FlashAttention that vLLM ships, and PyTorch's own.

FlashAttention computes in float16 and bfloat16 with heads of at most 256 channels, in multiples of 8. ``attention``,
the platform's default, uses it wherever it can and PyTorch's elsewhere (a stage in float32, say), which follows from
dtype and head size alone and is logged once for each. To few keys, as in attention to a text, it prefers cuDNN's
through PyTorch, which is faster there. ``flash_attention`` and ``scaled_dot_product_attention`` are what a user gets
by name: each does what it says or raises.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from omni_core.diffusion.contract import Attention
from omni_core.errors import ConfigError

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD_DIM = 256
FEW_KEYS = 1024
"""Up to so many keys, cuDNN's attention took 0.2 to 0.8 of the time of FlashAttention 3 on an H200."""

CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

logger = logging.getLogger(__name__)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """FlashAttention where it can compute this dtype and head size, otherwise PyTorch's; cuDNN's to few keys."""
    chosen = _choose(query.dtype, query.shape[-1])
    if chosen is flash_attention and key.shape[1] <= FEW_KEYS:
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            return scaled_dot_product_attention(query, key, value, scale)
    return chosen(query, key, value, scale)


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """See ``omni_core.diffusion.contract.Attention``; every floating dtype and head size."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """See ``omni_core.diffusion.contract.Attention``; version 3 on Hopper, as vLLM chooses for the device.

    Raises:
        ConfigError: FlashAttention does not compute this dtype or head size.
    """
    head_dim = query.shape[-1]
    if reason := why_not_flash(query.dtype, head_dim):
        raise ConfigError(f"attention 'flash-attention' {reason}; choose 'sdpa'")
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    batch, query_length, key_length = query.shape[0], query.shape[1], key.shape[1]
    result: torch.Tensor = flash_attn_varlen_func(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        max_seqlen_q=query_length,
        cu_seqlens_q=_offsets(batch, query_length, query.device),
        max_seqlen_k=key_length,
        cu_seqlens_k=_offsets(batch, key_length, query.device),
        softmax_scale=scale,
        fa_version=_flash_version(head_dim),
    )
    return result.unflatten(0, (batch, query_length))


def why_not_flash(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention cannot be used, or ``None`` where it can."""
    if dtype not in FLASH_DTYPES:
        return f"does not compute in {str(dtype).removeprefix('torch.')}"
    if head_dim > FLASH_MAX_HEAD_DIM or head_dim % 8:
        return f"does not take heads of {head_dim} channels (multiples of 8 up to {FLASH_MAX_HEAD_DIM})"
    return None


@cache
def _choose(dtype: torch.dtype, head_dim: int) -> Attention:
    reason = why_not_flash(dtype, head_dim)
    if reason is None:
        return flash_attention
    logger.warning("Using PyTorch's attention, since FlashAttention %s.", reason)
    return scaled_dot_product_attention


@cache
def _flash_version(head_dim: int) -> int:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version(head_size=head_dim)
    if version is None:
        raise ConfigError("this build of vLLM has no FlashAttention for this device; choose attention 'sdpa'")
    return int(version)


def _offsets(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Where each sequence of a packed batch begins, int32 [batch + 1]."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
