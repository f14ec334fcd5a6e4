"""From logits to a token: temperature, min-p, top-k and top-p, Gumbel sampling, replayed traces.

Replaces kernels of ``vllm/v1/worker/gpu/sample/`` (``gumbel``, ``min_p``, ``trace_replay``). There are L logits rows,
one for each sampled token: ``logits`` [L, vocabulary]; ``expanded_idx_mapping`` int32 [L], their slots. Sampling
parameters are by slot, float32 [S] unless said otherwise.
"""
# ruff: noqa: N803 (the parameters are vLLM's)

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from omni_platform_cpu.kernels import replaces
from omni_platform_cpu.kernels.noise import noisy_argmax
from omni_platform_cpu.triton_backend import unsupported

MODULE = "vllm.v1.worker.gpu.sample."
TOP_K_TOP_P = "vllm.v1.sample.ops.topk_topp_sampler"
DRAFT_POSITIONS = 1 << 30
"""What drafting adds to positions, to draw other noise than verifying (vLLM: ``_DRAFT_NOISE_SALT``)."""


@replaces(MODULE + "gumbel._temperature_kernel")
def temperature(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row of float32 logits by its temperature; 0, which means greedy, leaves the row."""
    by = temperature_ptr[expanded_idx_mapping_ptr.long()]
    logits_ptr.div_(by.masked_fill(by == 0, 1.0).unsqueeze(1))


@replaces(MODULE + "min_p._min_p_kernel")
def min_p(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Mask what is less likely than ``min_p`` times the row's most likely token; 0 masks nothing."""
    least = min_p_ptr[expanded_idx_mapping_ptr.long()].log()  # of 0: -inf
    logits_ptr.masked_fill_(logits_ptr < logits_ptr.amax(1, keepdim=True) + least.unsqueeze(1), float("-inf"))


@replaces(TOP_K_TOP_P + ".apply_top_k_top_p")
def apply_top_k_top_p_with_hint(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, has_topp_only_rows: bool = True
) -> torch.Tensor:
    """``apply_top_k_top_p`` of vLLM 0.33; the hint is for Triton."""
    return apply_top_k_top_p(logits, k, p)


@replaces(TOP_K_TOP_P + ".apply_top_k_top_p")
def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Mask all but the ``k`` int32 [L] most likely tokens, then all but those that make up ``p`` [L].

    vLLM's in PyTorch; it is the function that chooses a kernel, not a kernel, that is replaced.
    """
    ops: Any = importlib.import_module(TOP_K_TOP_P)
    masked: torch.Tensor = ops.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
    return masked


@replaces(MODULE + "gumbel._gumbel_sample_kernel")
def gumbel_sample(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Sample each row: the most likely token at temperature 0, else the largest of logit and Gumbel noise.

    ``seeds`` int64 [S]; ``pos`` int64 [L], the position of the token that the logits follow. The kernel leaves a
    winner for each block of the vocabulary, ``local_argmax`` int64 and ``local_max`` [L, blocks], of which the caller
    takes the largest; here column 0 has the winner and the others nothing.
    """
    if logits_cache_ptr is not None:
        raise unsupported(MODULE + "gumbel._gumbel_sample_kernel", "speculative decoding")
    logits = logits_ptr.float().numpy()
    slots = expanded_idx_mapping_ptr.numpy()
    temperatures = np.where(slots >= 0, temp_ptr.numpy()[slots], np.float32(0))
    sampled = temperatures != 0
    winners = local_argmax_ptr.numpy()[:, 0]
    if not sampled.all():
        greedy = ~sampled
        winners[greedy] = (logits if greedy.all() else logits[greedy]).argmax(1)
    if sampled.any():
        rows = sampled.nonzero()[0]
        scores = logits if len(rows) == len(logits) else logits[rows]
        if APPLY_TEMPERATURE:
            scores = scores / temperatures[rows, None]
        positions = pos_ptr.numpy()[rows] + (DRAFT_POSITIONS if IS_DRAFTING else 0)
        seeds = seeds_ptr.numpy()[slots[rows]]
        winners[rows] = noisy_argmax(scores, seeds.tolist(), positions.tolist(), fp64=USE_FP64)
    local_max = local_max_ptr.numpy()
    local_max[:, 1:] = -np.inf
    local_max[:, 0] = 0


@replaces(MODULE + "trace_replay._trace_replay_kernel")
def trace_replay(
    sampled_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    trace_token_ids_ptr: torch.Tensor,
    trace_token_ids_stride: int,
    trace_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    prompt_len_ptr: torch.Tensor,
) -> None:
    """Replace the sampled token, int64 [L], by the one that the slot's trace, int32 [S, max_model_len], has for it."""
    slots = idx_mapping_ptr.numpy()
    steps = total_len_ptr.numpy()[slots] - prompt_len_ptr.numpy()[slots]
    rows = ((slots >= 0) & (steps >= 0) & (steps < trace_len_ptr.numpy()[slots])).nonzero()[0]
    sampled_ptr.numpy()[rows] = trace_token_ids_ptr.numpy()[slots[rows], steps[rows]]
