"""What changes logits before sampling: penalties, biases, allowed, minimal and bad tokens, grammars.

Replaces kernels of ``vllm/v1/worker/gpu/sample/`` (``penalties``, ``logit_bias``, ``bad_words``) and
``structured_outputs``. Shapes as in ``sampling``; logits are float32 except for grammars. These run for few requests,
so they go row by row.
"""
# ruff: noqa: N803 (the parameters are vLLM's)

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from omni_platform_cpu.kernels import replaces

MODULE = "vllm.v1.worker.gpu.sample."
INF = float("inf")


def _bits(words: torch.Tensor, count: int) -> npt.NDArray[np.bool_]:
    """The first ``count`` bits of int32 words, the lowest of each word first."""
    return np.unpackbits(words.numpy().view(np.uint8), count=count, bitorder="little").view(np.bool_)


@replaces(MODULE + "penalties._penalties_kernel")
def penalties(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Penalize tokens of a slot's prompt and output.

    Repetition divides positive and multiplies negative logits of every token that occurred; frequency subtracts its
    penalty for each time that the token is in the output, presence once. ``prompt_bin_mask`` int32 [S, vocabulary /
    32] has a bit for each token of the prompt, ``output_bin_counts`` int32 [S, vocabulary] the counts of the output.
    Drafts before the row's own count too: ``token_ids`` int32 [L], ``expanded_local_pos`` int32 [L].
    """
    slots, drafts, counts = (
        expanded_idx_mapping_ptr.numpy(),
        expanded_local_pos_ptr.numpy(),
        output_bin_counts_ptr.numpy(),
    )
    repetition, frequency = repetition_penalty_ptr.numpy()[slots], frequency_penalty_ptr.numpy()[slots]
    presence = presence_penalty_ptr.numpy()[slots]
    for row in ((repetition != 1) | (frequency != 0) | (presence != 0)).nonzero()[0]:
        slot, logits, count = slots[row], logits_ptr[row].numpy(), counts[slots[row], :vocab_size]
        if drafts[row]:
            count = count.copy()
            np.add.at(count, token_ids_ptr.numpy()[row - drafts[row] + 1 : row + 1], 1)
        output = count.nonzero()[0]
        if repetition[row] != 1:
            seen = _bits(prompt_bin_mask_ptr[slot], vocab_size)
            seen[output] = True
            tokens = seen.nonzero()[0]
            values = logits[tokens]
            logits[tokens] = values * np.where(values > 0, np.float32(1) / repetition[row], repetition[row])
        logits[output] -= frequency[row] * count[output].astype(np.float32)
        logits[output] -= presence[row]


@replaces(MODULE + "penalties._bincount_kernel")
def bincount(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Count the tokens of slots that join or resume: of the prompt as bits, of the output as numbers.

    The caller has set the slots' masks and counts to 0. ``prompt_len`` and ``prefill_len`` int32 [S]: what is between
    them was output before the request was preempted.
    """
    token_ids, masks = all_token_ids_ptr.numpy(), prompt_bin_mask_ptr.numpy().view(np.uint32)
    for slot in expanded_idx_mapping_ptr.tolist():
        prompt, prefill = int(prompt_len_ptr[slot]), int(prefill_len_ptr[slot])
        tokens = token_ids[slot, :prompt]
        np.bitwise_or.at(masks[slot], tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
        np.add.at(output_bin_counts_ptr.numpy()[slot], token_ids[slot, prompt:prefill], 1)


@replaces(MODULE + "logit_bias._bias_kernel")
def bias(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Mask all but allowed tokens, add biases, and mask stop tokens while the sequence is shorter than ``min_lens``.

    Each kind has a number int32 [S] and ids int32 [S, most]; 0 for none. ``bias`` float32 [S, most]. Where masking
    stop tokens leaves nothing at all and the slot's ``restore_when_all_masked`` says so, the finite ones come back.
    """
    slots = expanded_idx_mapping_ptr.numpy()
    allowed, biased = num_allowed_token_ids_ptr.numpy()[slots], num_logit_bias_ptr.numpy()[slots]
    stops = np.where(pos_ptr.numpy() + 1 < min_lens_ptr.numpy()[slots], num_stop_token_ids_ptr.numpy()[slots], 0)
    for row in ((allowed > 0) | (biased > 0) | (stops > 0)).nonzero()[0]:
        slot, logits = slots[row], logits_ptr[row].numpy()
        if allowed[row] > 0:
            tokens = allowed_token_ids_ptr[slot, : int(allowed[row])].numpy()
            kept = logits[tokens]
            logits.fill(-INF)
            logits[tokens] = kept
        if biased[row] > 0:
            tokens = bias_token_ids_ptr[slot, : int(biased[row])].numpy()
            logits[tokens] += bias_ptr[slot, : int(biased[row])].numpy()
        if stops[row] > 0:
            tokens = stop_token_ids_ptr[slot, : int(stops[row])].numpy()
            kept = logits[tokens]
            logits[tokens] = -INF
            if CHECK_ALL_MASKED_ROWS and restore_when_all_masked_ptr[slot] and logits.max() == -INF:
                logits[tokens] = np.where(np.isfinite(kept), kept, -INF)


@replaces(MODULE + "bad_words._bad_words_kernel")
def bad_words(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Mask the last token of each bad word whose other tokens are the end of the output.

    ``bad_word_token_ids`` int32 [S, most] has a slot's words one after the other, ``bad_word_offsets`` int32 [S,
    most] where they begin and the last one ends. The output is the slot's, then the row's drafts from ``input_ids``
    int32 [L].
    """
    slots, drafts = expanded_idx_mapping_ptr.tolist(), expanded_local_pos_ptr.tolist()
    for row, (slot, ahead) in enumerate(zip(slots, drafts, strict=True)):
        words = int(num_bad_words_ptr[slot])
        if words == 0:
            continue
        offsets = bad_word_offsets_ptr[slot, : words + 1].tolist()
        tokens = bad_word_token_ids_ptr[slot, : offsets[-1]].tolist()
        longest = max(end - start for start, end in itertools.pairwise(offsets)) - 1
        prompt, total = int(prompt_len_ptr[slot]), int(total_len_ptr[slot])
        output = all_token_ids_ptr[slot, max(prompt, total - longest) : total].tolist()
        output += input_ids_ptr[row - ahead + 1 : row + 1].tolist()
        for start, end in itertools.pairwise(offsets):
            before = end - start - 1
            if before <= len(output) and output[len(output) - before :] == tokens[start : end - 1]:
                logits_ptr[row, tokens[end - 1]] = -INF


@replaces("vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel")
def apply_grammar_bitmask(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Mask the tokens that a grammar forbids, in logits of any dtype.

    ``bitmask`` int32 [M, vocabulary / 32], a bit for each allowed token; ``logits_indices`` int32 [>= M] says of each
    mask ``row of the batch * MASK_STRIDE + which of the row's logits``; of ``cu_num_logits`` see ``batch``.
    """
    cumulated = cu_num_logits_ptr.tolist()
    for mask, index in zip(bitmask_ptr, logits_indices_ptr.tolist(), strict=False):
        row, position = divmod(index, MASK_STRIDE)
        if position < cumulated[row + 1] - cumulated[row]:
            forbidden = torch.from_numpy(~_bits(mask, vocab_size))
            logits_ptr[cumulated[row] + position].masked_fill_(forbidden, -INF)
