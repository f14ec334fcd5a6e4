"""A step's batch: its tokens, positions and lengths before the forward pass, its requests' counters after it.

Replaces the kernels of ``vllm/v1/worker/gpu/input_batch.py``. Shapes, with N rows, T tokens and S slots:
``idx_mapping`` int32 [N], the slot of each row; ``query_start_loc`` int32 [>= N + 1], where each row's tokens begin;
``num_computed_tokens``, ``prefill_len`` and ``total_len`` int32 [S]; ``all_token_ids`` int32 [S, max_model_len],
prompts and outputs.
"""
# ruff: noqa: N803 (the parameters are vLLM's)

from __future__ import annotations

import numpy as np
import torch

from omni_platform_cpu.kernels import replaces

MODULE = "vllm.v1.worker.gpu.input_batch."


@replaces(MODULE + "_prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled part of each unfinished prefill into ``input_ids`` int32 [>= T].

    ``next_prefill_tokens`` int32 [num_lookahead, S] gets the tokens that follow it, 0 past the end of the prefill.
    """
    slots = idx_mapping_ptr.numpy()
    prefill, computed = prefill_lens_ptr.numpy()[slots], num_computed_tokens_ptr.numpy()[slots]
    rows = (computed < prefill).nonzero()[0]
    if not len(rows):
        return
    input_ids, following = input_ids_ptr.numpy(), next_prefill_tokens_ptr.numpy()
    token_ids, starts = all_token_ids_ptr.numpy(), query_start_loc_ptr.numpy()
    for row in rows:
        slot, first, start, end = slots[row], computed[row], starts[row], starts[row + 1]
        stop = first + end - start
        input_ids[start:end] = token_ids[slot, first:stop]
        for ahead in range(num_lookahead):
            position = stop + ahead
            following[ahead, slot] = token_ids[slot, position] if position < prefill[row] else 0


@replaces(MODULE + "_prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions int64 [>= T] of the scheduled tokens, and sequence lengths int32 [max_num_reqs], 0 past the batch."""
    slots, lengths = idx_mapping_ptr.numpy(), seq_lens_ptr.numpy()
    rows = len(slots)
    starts = query_start_loc_ptr.numpy()[: rows + 1]
    queries, computed = starts[1:] - starts[:-1], num_computed_tokens_ptr.numpy()[slots]
    lengths[:rows] = computed + queries
    lengths[rows:max_num_reqs] = 0
    first, last = starts[0], starts[-1]
    positions = pos_ptr.numpy()[first:last]
    if last - first == rows and queries.all():  # one token each, the usual step
        positions[:] = computed
    else:
        positions[:] = np.arange(first, last) + np.repeat(computed - starts[:-1], queries)


@replaces(MODULE + "_combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Put the token that was sampled last, then drafts, into ``input_ids`` int32 [>= T] of rows that decode.

    ``logits_indices`` int64 [L] gets the tokens whose logits are wanted: of each row the last ``cu_num_logits[row +
    1] - cu_num_logits[row]``. A token of the prompt is never overwritten. ``last_sampled_tokens`` int64 [S] or [S,
    1]; ``draft_tokens`` int64 [S, D].
    """
    slots = idx_mapping_ptr.numpy()
    rows = len(slots)
    cumulated, ends = cu_num_logits_ptr.numpy()[: rows + 1], query_start_loc_ptr.numpy()[1 : rows + 1]
    wanted = cumulated[1:] - cumulated[:-1]
    starts = ends - wanted
    indices = logits_indices_ptr.numpy()
    if len(indices) == rows and wanted.all():  # one each
        indices[:] = starts
    else:
        indices[: cumulated[-1]] = np.arange(cumulated[-1]) + np.repeat(starts - cumulated[:-1], wanted)

    lengths, prefill, input_ids = seq_lens_ptr.numpy()[:rows], prefill_len_ptr.numpy()[slots], input_ids_ptr.numpy()
    decoding = lengths > prefill
    if NUM_NEW_SAMPLED_TOKENS > 0:
        write = decoding & (lengths - wanted >= prefill)
        input_ids[starts[write]] = last_sampled_tokens_ptr.numpy().reshape(-1)[slots[write]]
    drafts = wanted - NUM_NEW_SAMPLED_TOKENS
    if drafts.any():
        draft_tokens = draft_tokens_ptr.numpy()
        for row in (decoding & (drafts > 0)).nonzero()[0]:
            input_ids[ends[row] - drafts[row] : ends[row]] = draft_tokens[slots[row], : drafts[row]]


@replaces(MODULE + "_get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """``num_rejected`` int32 [N] is what was not sampled of the logits; a prefill that goes on samples nothing."""
    slots = idx_mapping_ptr.numpy()
    rows = len(slots)
    unfinished = seq_lens_ptr.numpy()[:rows] < prefill_len_ptr.numpy()[slots]
    sampled, rejected = num_sampled_ptr.numpy()[:rows], num_rejected_ptr.numpy()[:rows]
    cumulated = cu_num_logits_ptr.numpy()[: rows + 1]
    sampled[unfinished] = 0
    rejected[:] = cumulated[1:] - cumulated[:-1] - sampled
    rejected[unfinished] = 0


@replaces(MODULE + "_post_update_kernel")
def post_update_with_drafts(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor | None,
    draft_tokens_out_ptr: torch.Tensor | None,
    num_draft_tokens: int,
    *,
    num_warps: int = 1,
) -> None:
    """``post_update`` of vLLM 0.33, which also keeps each row's next drafts, int64 [N, D], by slot, [S, D]."""
    if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
        slots = idx_mapping_ptr.long()
        live = slots >= 0
        draft_tokens_out_ptr[slots[live]] = draft_tokens_ptr[: len(slots)][live]
    post_update(
        idx_mapping_ptr,
        num_computed_tokens_ptr,
        last_sampled_tokens_ptr,
        output_bin_counts_ptr,
        output_bin_counts_stride,
        sampled_tokens_ptr,
        sampled_tokens_stride,
        num_sampled_ptr,
        num_rejected_ptr,
        query_start_loc_ptr,
        all_token_ids_ptr,
        all_token_ids_stride,
        total_len_ptr,
    )


@replaces(MODULE + "_post_update_kernel")
def post_update(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    *,
    num_warps: int = 1,
) -> None:
    """Append what each row sampled to its slot's tokens, count it, and advance the slot.

    ``sampled_tokens`` int64 [N, D + 1], of which ``num_sampled`` int32 [N] count; ``output_bin_counts`` int32 [S,
    vocabulary]; a slot advances by its row's tokens less ``num_rejected`` int32 [N]. A row of slot -1 is left out.
    """
    slots = idx_mapping_ptr.numpy()
    rows = len(slots)
    counts, rejected, sampled = (
        num_sampled_ptr.numpy()[:rows],
        num_rejected_ptr.numpy()[:rows],
        sampled_tokens_ptr.numpy(),
    )
    totals, last, token_ids = (
        total_len_ptr.numpy(),
        last_sampled_tokens_ptr.numpy().reshape(-1),
        all_token_ids_ptr.numpy(),
    )
    bins = None if output_bin_counts_ptr is None else output_bin_counts_ptr.numpy()

    live = slots >= 0
    writing = (live & (counts > 0)).nonzero()[0]
    where = slots[writing]
    if sampled.shape[1] == 1:
        tokens = sampled[writing, 0]
        token_ids[where, totals[where]] = tokens
        if bins is not None:
            bins[where, tokens] += 1
    else:
        tokens = sampled[writing, counts[writing] - 1]
        for row, slot in zip(writing, where, strict=True):
            new = sampled[row, : counts[row]]
            token_ids[slot, totals[slot] : totals[slot] + counts[row]] = new
            if bins is not None:
                np.add.at(bins[slot], new, 1)
    last[where] = tokens
    totals[where] += counts[writing]

    advance = -rejected
    if query_start_loc_ptr is not None:
        starts = query_start_loc_ptr.numpy()[: rows + 1]
        advance = starts[1:] - starts[:-1] - rejected
    num_computed_tokens_ptr.numpy()[slots[live]] += advance[live]


@replaces(MODULE + "_post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor
) -> None:
    """Advance each slot by its row's tokens, where nothing is sampled (pooling)."""
    slots = idx_mapping_ptr.numpy()
    num_computed_tokens_ptr.numpy()[slots] += np.diff(query_start_loc_ptr.numpy()[: len(slots) + 1])


@replaces(MODULE + "_expand_idx_mapping_kernel")
def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """For each of the L logits its slot, int32 [L], and its place among its row's, int32 [L]."""
    slots = idx_mapping_ptr.numpy()
    cumulated = cu_num_logits_ptr.numpy()[: len(slots) + 1]
    wanted, total = np.diff(cumulated), cumulated[-1]
    expanded_idx_mapping_ptr.numpy()[:total] = np.repeat(slots, wanted)
    expanded_local_pos_ptr.numpy()[:total] = np.arange(total) - np.repeat(cumulated[:-1], wanted)
