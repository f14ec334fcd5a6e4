"""The KV cache's block tables: staged writes, a step's tables, and the cache slot of each token.

Replaces kernels of ``vllm/v1/worker/gpu/buffer_utils.py`` and ``block_table.py``. There are G groups of layers, each
with its own block size and its own table, int32 [S, max blocks]. Tables of several groups are passed by address.
"""
# ruff: noqa: N803 (the parameters are vLLM's)

from __future__ import annotations

import numpy as np
import torch

from omni_platform_cpu.kernels import replaces
from omni_platform_cpu.kernels.memory import int32_at
from omni_platform_cpu.triton_backend import unsupported

WRITES = "vllm.v1.worker.gpu.buffer_utils."
TABLES = "vllm.v1.worker.gpu.block_table."


@replaces(WRITES + "_apply_write_kernel")
def apply_write(
    output_ptr: torch.Tensor,
    output_stride: int | torch.Tensor,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Write W pieces of ``write_contents`` into rows of a state tensor, each from its start on.

    ``write_indices``, ``write_starts`` and ``write_cu_lens`` (the pieces' ends) int32 [>= W]. With MULTI_GROUP,
    ``output`` uint64 [G] has the addresses of G int32 tables, ``output_stride`` int64 [G] their widths, and
    ``write_group_ids`` int32 [W] each piece's table.
    """
    contents = write_contents_ptr.numpy()
    pieces = zip(write_indices_ptr.tolist(), write_starts_ptr.tolist(), write_cu_lens_ptr.tolist(), strict=True)
    begin = 0
    if not MULTI_GROUP:
        flat = output_ptr.view(-1).numpy()
        for row, start, end in pieces:
            offset = row * output_stride + start
            flat[offset : offset + end - begin] = contents[begin:end]
            begin = end
        return
    assert write_group_ids_ptr is not None and isinstance(output_stride, torch.Tensor)
    addresses, widths = output_ptr.tolist(), output_stride.tolist()
    for group, (row, start, end) in zip(write_group_ids_ptr.tolist(), pieces, strict=True):
        width = widths[group]
        table_row = int32_at(addresses[group] + 4 * row * width, 1, width)[0]
        table_row[start : start + end - begin] = contents[begin:end]
        begin = end


@replaces(TABLES + "_gather_block_tables_kernel")
def gather_block_tables_in_window(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens_ptr: torch.Tensor,
    sliding_window_reach_ptr: torch.Tensor,
    block_sizes_ptr: torch.Tensor,
    MASK_SLIDING_WINDOW: bool,
    BLOCK_SIZE: int,
) -> None:
    """``gather_block_tables`` of vLLM 0.33, which also nulls blocks that no token of this step can attend to.

    With MASK_SLIDING_WINDOW those are, of a group with ``sliding_window_reach`` int32 [G] above 0, the blocks that
    end before the slot's next position less the reach. They may belong to another request by now.
    """
    gather_block_tables(
        batch_idx_to_req_idx,
        src_block_table_ptrs,
        dst_block_table_ptrs,
        block_table_strides,
        num_blocks_ptr,
        num_blocks_stride,
        num_reqs,
        BLOCK_SIZE,
    )
    if not MASK_SLIDING_WINDOW:
        return
    slots = batch_idx_to_req_idx.numpy()[:num_reqs]
    reaches, sizes = sliding_window_reach_ptr.tolist(), block_sizes_ptr.tolist()
    groups = zip(dst_block_table_ptrs.tolist(), block_table_strides.tolist(), reaches, sizes, strict=True)
    for address, width, reach, size in groups:
        if reach > 0:
            table = int32_at(address, num_blocks_ptr.shape[1], width)
            outside = np.maximum(num_computed_tokens_ptr.numpy()[slots] - reach, 0) // size
            for row in outside.nonzero()[0]:
                table[row, : outside[row]] = 0


@replaces(TABLES + "_gather_block_tables_kernel")
def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the batch's rows of each group's table into the table of this step, in the batch's order.

    ``src`` and ``dst_block_table_ptrs`` uint64 [G], addresses of int32 [S, width]; ``num_blocks`` int32 [G, S]. Rows
    past the batch become 0, the null block: the kernel zeroes as many as its grid has, which a replacement does not
    learn.
    """
    slots, num_blocks = batch_idx_to_req_idx.numpy()[:num_reqs], num_blocks_ptr.numpy()
    rows = num_blocks.shape[1]
    groups = zip(
        src_block_table_ptrs.tolist(),
        dst_block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        num_blocks,
        strict=True,
    )
    for source_address, address, width, counts in groups:
        source, table = int32_at(source_address, rows, width), int32_at(address, rows, width)
        used = counts[slots].max(initial=0)  # what a shorter row has past its end is never read
        table[:num_reqs, :used] = source[slots, :used]
        table[num_reqs:] = 0


@replaces(TABLES + "_compute_slot_mappings_kernel")
def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Where in each group's cache each token's key and value go: ``slot_mappings`` int64 [G, max_num_tokens].

    That is ``table[slot, position // block size] * block size + position % block size``; PAD_ID for tokens of a dummy
    row (slot -1), past the batch, and of groups without a mapping. ``block_table_ptrs`` uint64 [G], addresses of
    int32 tables.
    """
    if CP_SIZE != 1:
        raise unsupported(TABLES + "_compute_slot_mappings_kernel", "context parallelism")
    slots, mappings = idx_mapping.numpy(), slot_mappings_ptr.numpy()
    rows = len(slots)
    starts = query_start_loc.numpy()[: rows + 1]
    first, last = starts[0], starts[-1]
    if last - first != rows:
        slots = np.repeat(slots, starts[1:] - starts[:-1])
    positions = pos.numpy()[first:last]
    highest, dummies = int(slots.max(initial=0)) + 1, bool(slots.min(initial=0) < 0)
    groups = zip(
        block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        block_sizes.tolist(),
        slot_mapping_enabled.tolist(),
        mappings,
        strict=True,
    )
    for address, width, size, enabled, mapping in groups:
        mapping[last:max_num_tokens] = PAD_ID
        if not enabled:
            mapping[first:last] = PAD_ID
            continue
        table = int32_at(address, highest, width)
        block, offset = np.divmod(positions, size)
        if dummies:
            block[slots < 0] = 0
        mapping[first:last] = table[slots, block] * np.int64(size) + offset
        if dummies:
            mapping[first:last][slots < 0] = PAD_ID
