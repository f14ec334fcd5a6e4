"""What a model takes beside token ids: positions in several dimensions, and embeddings in place of tokens.

Replaces kernels of ``vllm/v1/worker/gpu/mm/rope.py`` and ``model_states/prompt_embeds.py``. Shapes as in ``batch``.
"""
# ruff: noqa: N803 (the parameters are vLLM's)

from __future__ import annotations

import numpy as np
import torch

from omni_platform_cpu.kernels import replaces
from omni_platform_cpu.kernels.memory import tensor_at


@replaces("vllm.v1.worker.gpu.mm.rope._prepare_rope_positions_kernel")
def prepare_rope_positions(
    positions_ptr: torch.Tensor,
    positions_stride: int,
    prefill_positions_ptr: torch.Tensor,
    prefill_positions_stride0: int,
    prefill_positions_stride1: int,
    prefill_delta_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_DIMS: int,
) -> None:
    """M-RoPE positions int64 [D, > T] of the scheduled tokens.

    In a prefill they are the slot's own, ``prefill_positions`` int32 [S * D, max_model_len]; after it all D are the
    token's index plus the slot's ``prefill_delta`` int32 [S].
    """
    slots = idx_mapping_ptr.numpy()
    rows = len(slots)
    starts = query_start_loc_ptr.numpy()[: rows + 1]
    queries, computed = starts[1:] - starts[:-1], num_computed_tokens_ptr.numpy()[slots]
    first, last = starts[0], starts[-1]
    positions, prefill_positions = positions_ptr.numpy(), prefill_positions_ptr.numpy()
    shift = computed + prefill_delta_ptr.numpy()[slots] - starts[:-1]
    positions[:, first:last] = np.arange(first, last) + np.repeat(shift, queries)
    for row in (computed < prefill_lens_ptr.numpy()[slots]).nonzero()[0]:
        own = prefill_positions[NUM_DIMS * slots[row] : NUM_DIMS * (slots[row] + 1)]
        positions[:, starts[row] : starts[row + 1]] = own[:, computed[row] : computed[row] + queries[row]]


@replaces("vllm.v1.worker.gpu.model_states.prompt_embeds._apply_prompt_embeds_kernel")
def apply_prompt_embeds(
    inputs_embeds_ptr: torch.Tensor,
    inputs_embeds_stride: int,
    embeds_ptrs_ptr: torch.Tensor,
    mask_ptrs_ptr: torch.Tensor,
    embeds_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    hidden_size: int,
    TOKEN_BLOCK: int,
    BLOCK_SIZE: int,
) -> None:
    """Lay requests' own embeddings over ``inputs_embeds`` [>= T, hidden], in its dtype.

    ``embeds_ptrs`` uint64 [S] has the addresses of [length, hidden] in the same dtype, ``embeds_lens`` int32 [S] the
    lengths, 0 for none; ``mask_ptrs`` uint64 [S] the addresses of int8 [length], not 0 where a token id stands
    instead of an embedding, or 0 for a request without such a mask.
    """
    lengths, computed = embeds_lens_ptr.numpy(), num_computed_tokens_ptr.numpy()
    addresses, masks, starts = embeds_ptrs_ptr.numpy(), mask_ptrs_ptr.numpy(), query_start_loc_ptr.numpy()
    dtype = inputs_embeds_ptr.dtype
    for row, slot in enumerate(idx_mapping_ptr.tolist()):
        done, start = int(computed[slot]), int(starts[row])
        count = min(int(starts[row + 1]) - start, int(lengths[slot]) - done)
        if count <= 0:
            continue
        source = tensor_at(int(addresses[slot]) + done * hidden_size * dtype.itemsize, count, hidden_size, dtype)
        target = inputs_embeds_ptr[start : start + count]
        if masks[slot]:
            embedded = tensor_at(int(masks[slot]) + done, 1, count, torch.int8)[0] == 0
            target[embedded] = source[embedded]
        else:
            target.copy_(source)
