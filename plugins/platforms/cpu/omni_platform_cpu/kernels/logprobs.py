"""What is told about logits: log-probabilities, ranks, NaNs, which tokens were left to sample from.

Replaces kernels of ``vllm/v1/worker/gpu/sample/`` (``logprob``, ``prompt_logprob``, ``output``) and
``metrics/logits``. Shapes as in ``sampling``; logits of any floating dtype, arithmetic in float32.
"""
# ruff: noqa: N803 (the parameters are vLLM's)

from __future__ import annotations

import numpy as np
import torch

from omni_platform_cpu.kernels import replaces

MODULE = "vllm.v1.worker.gpu.sample."


@replaces(MODULE + "logprob._topk_log_softmax_kernel")
def topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """``output`` float32 [L, k]: the log-probabilities of the tokens ``topk_ids`` int64 [L, k]."""
    logits = logits_ptr.float()
    torch.sub(logits.gather(1, topk_ids_ptr), logits.logsumexp(1, keepdim=True), out=output_ptr)


@replaces(MODULE + "logprob._ranks_kernel")
def ranks(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """``output`` int64 [L]: the rank of each row's token, int64 [L]: how many are as likely or more."""
    own = logits_ptr.gather(1, token_ids_ptr.long().unsqueeze(1))
    output_ptr.copy_((logits_ptr >= own).sum(1))


@replaces(MODULE + "logprob._fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """Which tokens' log-probabilities each row tells, int64 [L, 1 + most], and which of these columns count, bool.

    First the sampled one, then those that the request named, int32 [S, most], or else the NUM_TOPK most likely,
    int32 [L, NUM_TOPK].
    """
    out_token_ids_ptr[:, 0] = sampled_token_ids_ptr
    out_valid_mask_ptr[:, 0] = True
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        named = int(num_per_req_token_ids_ptr[slot])
        count = named or NUM_TOPK
        if count:
            tokens = per_req_token_ids_ptr[slot] if named else topk_indices_ptr[row]
            out_token_ids_ptr[row, 1 : count + 1] = tokens[:count]
            out_valid_mask_ptr[row, 1 : count + 1] = True


@replaces(MODULE + "prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """For each scheduled token the one that follows it, int64 [T]; other shapes as in ``batch``."""
    starts, computed, following = (
        query_start_loc_ptr.tolist(),
        num_computed_tokens_ptr.numpy(),
        all_token_ids_ptr.numpy(),
    )
    token_ids = prompt_logprobs_token_ids_ptr.numpy()
    for row, slot in enumerate(idx_mapping_ptr.tolist()):
        first = int(computed[slot]) + 1
        tokens = following[slot, first : first + starts[row + 1] - starts[row]]  # shorter at the very end of the buffer
        token_ids[starts[row] : starts[row] + len(tokens)] = tokens


@replaces(MODULE + "output._compact_sampling_mask_kernel")
def compact_sampling_mask(
    logits_ptr: torch.Tensor,
    logits_row_stride: int,
    logits_col_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    num_sampled_tokens_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    token_ids_row_stride: int,
    packed_mask_ptr: torch.Tensor,
    packed_mask_row_stride: int,
    counts_ptr: torch.Tensor,
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
    BLOCK_SIZE: int,
) -> None:
    """Which tokens each sampled token was chosen from, those with a finite logit.

    For each of N * ROWS_PER_REQUEST outputs: the first ``max_num_kept`` of them, int32; all of them as bits, uint8;
    their number, int32, 0 for an output that was not sampled.
    """
    cumulated, sampled = cu_num_logits_ptr.tolist(), num_sampled_tokens_ptr.tolist()
    token_ids, packed, counts = token_ids_ptr.numpy(), packed_mask_ptr.numpy(), counts_ptr.numpy()
    for output in range(len(counts)):
        row, place = divmod(output, ROWS_PER_REQUEST)
        counts[output] = 0
        if place < sampled[row]:
            kept = logits_ptr[cumulated[row] + place].isfinite().numpy()
            tokens = kept.nonzero()[0]
            counts[output] = len(tokens)
            token_ids[output, : min(len(tokens), max_num_kept)] = tokens[:max_num_kept]
            packed[output] = np.packbits(kept, bitorder="little")


@replaces("vllm.v1.worker.gpu.metrics.logits._num_nans_kernel")
def num_nans(
    logits_ptr: torch.Tensor, logits_stride: int, num_nans_ptr: torch.Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    """``num_nans`` int32 [L]: how many logits of each row are NaN."""
    num_nans_ptr.copy_(logits_ptr.isnan().sum(1))
