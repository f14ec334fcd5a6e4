"""Run by the tests in a process of its own: every kernel interpreted by Triton, then replaced, on the same inputs.

With ``TRITON_INTERPRET=1`` and Omni's plugin set in the environment. Prints ``RESULTS {case: what differs, or ""}``.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

import numpy as np
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (as vLLM's CPU worker does, before any module of the runner)
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import block_table, input_batch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states import prompt_embeds
from vllm.v1.worker.gpu.sample import (
    bad_words,
    gumbel,
    logit_bias,
    logprob,
    min_p,
    penalties,
    prompt_logprob,
    trace_replay,
)
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

CPU = torch.device("cpu")
SLOTS, LENGTH, VOCABULARY = 6, 40, 100
# Four rows: a prefill that goes on, a prefill that ends, two that decode.
IDX = torch.tensor([4, 1, 5, 0], dtype=torch.int32)
COMPUTED = torch.tensor([12, 3, 0, 0, 2, 20], dtype=torch.int32)
PREFILL = torch.tensor([10, 8, 0, 0, 30, 15], dtype=torch.int32)
STARTS = torch.tensor([0, 7, 12, 13, 14, 0], dtype=torch.int32)
SEQ_LENS = torch.tensor([9, 8, 21, 13, 0, 0], dtype=torch.int32)
Outputs = dict[str, torch.Tensor]
CASES: dict[str, Callable[[], Outputs]] = {}


def case(function: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Add a case; it gets the same random numbers each time, and returns what the kernels wrote."""
    CASES[function.__name__] = function
    return function


def token_ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (SLOTS, LENGTH), dtype=torch.int32)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@case
def staged_writes() -> Outputs:
    found = {}
    for dtype in (torch.int32, torch.int64, torch.float32):
        state = StagedWriteTensor((SLOTS, LENGTH), dtype=dtype, device=CPU)
        state.stage_write(3, 5, [1, 2, 3])
        state.stage_write(0, 0, list(range(LENGTH)))
        state.stage_write(3, 6, [9])
        state.apply_write()
        found[str(dtype)] = state.gpu
    single = StagedWriteTensor(SLOTS, dtype=torch.int32, device=CPU)
    single.stage_write_elem(2, 7)
    single.stage_write_elem(5, 8)
    single.apply_write()
    return {**found, "single": single.gpu}


def tables(sizes: list[int], enabled: list[bool]) -> Outputs:
    table = block_table.BlockTables(
        block_sizes=sizes,
        max_num_reqs=SLOTS,
        max_num_batched_tokens=32,
        max_num_blocks_per_group=[8 + i for i in range(len(sizes))],
        device=CPU,
        slot_mapping_enabled=enabled,
    )
    for slot in IDX.tolist():
        table.append_block_ids(slot, tuple(list(range(10 * slot, 10 * slot + 6)) for _ in sizes), overwrite=True)
    table.apply_staged_writes()
    table.append_block_ids(4, tuple([97 + group] for group in range(len(sizes))), overwrite=False)
    table.apply_staged_writes()
    gathered = table.gather_block_tables(IDX, 5)
    positions = torch.cat([torch.arange(2, 9), torch.arange(3, 8), torch.tensor([20, 12])])
    found = {f"table {group}": rows.clone() for group, rows in enumerate(gathered)}
    found["mapping"] = table.compute_slot_mappings(IDX, STARTS, positions, 20).clone()
    dummies = torch.tensor([4, -1, 5, -1], dtype=torch.int32)
    found["dummies"] = table.compute_slot_mappings(dummies, STARTS, positions, 20).clone()
    return found


@case
def one_block_table() -> Outputs:
    return tables([16], [True])


@case
def several_block_tables() -> Outputs:
    return tables([16, 4, 8], [True, True, False])


@case
def prefill_inputs() -> Outputs:
    found = {}
    for ahead in (1, 3):
        ids, following = torch.zeros(20, dtype=torch.int32), torch.zeros(ahead, SLOTS, dtype=torch.int32)
        input_batch.prepare_prefill_inputs(ids, following, IDX, STARTS, token_ids(), PREFILL, COMPUTED)
        found |= {f"ids {ahead}": ids, f"following {ahead}": following}
    return found


@case
def positions_and_lengths() -> Outputs:
    found = {}
    for name, idx, starts in (("mixed", IDX, STARTS), ("decode", IDX[2:], int32(0, 1, 2))):
        positions, lengths = torch.zeros(20, dtype=torch.int64), torch.full((SLOTS,), 9, dtype=torch.int32)
        input_batch.prepare_pos_seq_lens(idx, starts, COMPUTED, positions, lengths)
        found |= {f"positions {name}": positions, f"lengths {name}": lengths}
    return found


@case
def combined_tokens() -> Outputs:
    found = {}
    for name, cumulated, starts, lengths, new in (
        ("plain", int32(0, 1, 2, 3, 4), STARTS, SEQ_LENS, 1),
        ("drafts", int32(0, 1, 2, 5, 6), int32(0, 7, 12, 15, 16), int32(9, 8, 23, 13), 1),
        ("tail", int32(0, 1, 2, 5, 6), int32(0, 7, 12, 15, 16), int32(9, 8, 16, 13), 1),
        ("none new", int32(0, 0, 0, 2, 3), int32(0, 7, 12, 14, 15), int32(9, 8, 22, 13), 0),
    ):
        ids = torch.zeros(20, dtype=torch.int32)
        found[f"indices {name}"] = input_batch.combine_sampled_and_draft_tokens(
            ids,
            IDX,
            torch.randint(1, VOCABULARY, (SLOTS, 1), dtype=torch.int64),
            starts,
            lengths,
            PREFILL,
            torch.randint(1, VOCABULARY, (SLOTS, 3), dtype=torch.int64),
            cumulated,
            int(cumulated[-1]),
            new,
        )
        found[f"ids {name}"] = ids
    return found


@case
def numbers_of_samples() -> Outputs:
    sampled, rejected = input_batch.get_num_sampled_and_rejected(
        int32(1, 1, 2, 1), SEQ_LENS, int32(0, 1, 2, 5, 6), IDX, PREFILL
    )
    return {"sampled": sampled, "rejected": rejected}


@case
def after_the_step() -> Outputs:
    found = {}
    for name, width, counts, starts, bins in (
        ("plain", 1, int32(0, 1, 1, 1), STARTS, True),
        ("no bins", 1, int32(0, 1, 1, 1), STARTS, False),
        ("drafts", 3, int32(0, 1, 3, 2), int32(0, 7, 12, 15, 18), True),
        ("no tokens", 1, int32(0, 1, 1, 1), None, True),
    ):
        state = {
            "computed": COMPUTED.clone(),
            "last": torch.zeros(SLOTS, 1, dtype=torch.int64),
            "all": token_ids(),
            "total": COMPUTED + 1,
        }
        if bins:
            state["bins"] = torch.randint(0, 3, (SLOTS, VOCABULARY), dtype=torch.int32)
        sampled = torch.randint(0, VOCABULARY, (4, width), dtype=torch.int64)
        if width == 3:
            sampled[2] = 7  # the same token several times
        input_batch.post_update(
            torch.tensor([4, 1, 5, -1], dtype=torch.int32),
            state["computed"],
            state["last"],
            state.get("bins"),
            sampled,
            counts,
            int32(0, 0, width - 1, 0),
            starts,
            state["all"],
            state["total"],
        )
        found |= {f"{key} {name}": value for key, value in state.items()}
    pooled = COMPUTED.clone()
    input_batch.post_update_num_computed_tokens(IDX, pooled, STARTS)
    expanded, place = input_batch.expand_idx_mapping(IDX, 6, int32(0, 1, 2, 5, 6), 4)
    return {**found, "pooled": pooled, "expanded": expanded, "place": place}


@case
def rope_positions() -> Outputs:
    found = {}
    for dims in (3, 4):
        state = RopeState(dims, SLOTS, 32, LENGTH, CPU)
        for row in range(dims * SLOTS):
            state.prefill_positions.stage_write(row, 0, torch.randint(0, 99, (LENGTH,)).tolist())
        state.prefill_delta.np[:] = [3, -2, 0, 0, 5, -7]
        state.apply_staged_writes()
        state.prepare_positions(IDX, STARTS, PREFILL, COMPUTED)
        found[str(dims)] = state.positions[:, :14].clone()
    return found


@case
def prompt_embeddings() -> Outputs:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        inputs = torch.randn(20, 24).to(dtype)
        embeds = {slot: torch.randn(8, 24).to(dtype) for slot in (4, 1)}
        mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.uint8)
        addresses, masks = torch.zeros(SLOTS, dtype=torch.uint64), torch.zeros(SLOTS, dtype=torch.uint64)
        for slot, rows in embeds.items():
            addresses.view(torch.int64)[slot] = rows.data_ptr()
        masks.view(torch.int64)[1] = mask.data_ptr()
        prompt_embeds._apply_prompt_embeds_kernel[(4, 1)](
            inputs,
            inputs.stride(0),
            addresses,
            masks,
            int32(0, 8, 0, 0, 8, 0),
            IDX,
            STARTS,
            COMPUTED,
            24,
            TOKEN_BLOCK=16,
            BLOCK_SIZE=32,
        )
        found[str(dtype)] = inputs
    return found


@case
def temperature_and_min_p() -> Outputs:
    hot, masked = torch.randn(4, VOCABULARY), 5 * torch.randn(4, VOCABULARY)
    gumbel.apply_temperature(hot, IDX, torch.tensor([0.0, 0.7, 0, 0, 1.0, 2.5]))
    min_p.apply_min_p(masked, IDX, torch.tensor([0.0, 0.1, 0, 0, 0.9, 0.001]))
    return {"temperature": hot, "min-p": masked}


@case
def gumbel_samples() -> Outputs:
    found = {}
    seeds = torch.tensor([7, -(2**40), 0, 0, 2**62 + 5, 1])
    temperatures = torch.tensor([0.8, 1.0, 0, 0, 0.0, 0.3])
    for round_, (dtype, options) in enumerate(
        [
            (torch.float32, {}),
            (torch.float32, {"apply_temperature": True}),
            (torch.bfloat16, {}),
            (torch.float32, {"use_fp64": True}),
            (torch.float32, {"is_drafting": True}),
        ]
    ):
        for vocabulary in (VOCABULARY, 3000):
            logits = torch.randn(4, vocabulary).to(dtype)
            logits[3, vocabulary // 2 :] = -torch.inf
            few = torch.full((4, vocabulary), -torch.inf)
            few[:, 5:9] = logits[:, 5:9].float()
            for name, scores in (("all", logits), ("few", few)):
                tokens = [
                    gumbel.gumbel_sample(
                        scores,
                        IDX,
                        temperatures,
                        seeds,
                        torch.tensor([8, 7, position, 12]),
                        **{"apply_temperature": False, "is_drafting": False, **options},
                    )
                    for position in range(3)
                ]
                found[f"{round_} {vocabulary} {name}"] = torch.stack(tokens)
    return found


@case
def penalized() -> Outputs:
    mask = torch.zeros(SLOTS, (VOCABULARY + 31) // 32, dtype=torch.int32)
    counts = torch.zeros(SLOTS, VOCABULARY, dtype=torch.int32)
    prompt, prefill = int32(9, 4, 1, 1, 20, 15), int32(12, 40, 1, 1, 20, 30)
    penalties.bincount(IDX, token_ids(), prompt, prefill, mask, counts, LENGTH)
    found = {"mask": mask, "counts": counts}
    for name, drafts in (("plain", int32(0, 0, 0, 0)), ("drafts", int32(0, 1, 2, 0))):
        logits = torch.randn(4, VOCABULARY)
        penalties.apply_penalties(
            logits,
            IDX if name == "plain" else int32(4, 4, 4, 1),
            torch.randint(0, VOCABULARY, (4,), dtype=torch.int32),
            drafts,
            torch.tensor([1.0, 1.3, 1, 1, 1.2, 1.0]),
            torch.tensor([0.5, 0.2, 0, 0, 0.0, 0.0]),
            torch.tensor([0.1, -0.3, 0, 0, 0.4, 0.0]),
            mask,
            counts,
        )
        found[name] = logits
    return found


@case
def biased() -> Outputs:
    found = {}
    for check in (False, True):
        logits = torch.randn(4, VOCABULARY)
        logits[3] = -torch.inf
        logits[3, 8] = 1.0
        allowed = torch.stack([torch.randperm(VOCABULARY)[:8] for _ in range(SLOTS)]).int()
        allowed[1] = torch.arange(8)
        stops = torch.arange(8, dtype=torch.int32).repeat(SLOTS, 1)
        stops[0] = 8 + torch.arange(8)
        logit_bias.apply_logit_bias(
            logits,
            IDX,
            torch.tensor([8, 7, 20, 12]),
            int32(0, 8, 0, 0, 5, 0),
            allowed,
            int32(0, 3, 0, 0, 0, 8),
            torch.stack([torch.randperm(VOCABULARY)[:8] for _ in range(SLOTS)]).int(),
            torch.randn(SLOTS, 8),
            int32(30, 30, 0, 0, 0, 5),
            int32(4, 8, 0, 0, 2, 3),
            torch.tensor([True, True, False, False, True, False]),
            stops,
            check,
        )
        found[str(check)] = logits
    return found


@case
def bad_word_masks() -> Outputs:
    logits, all_ids = torch.zeros(4, VOCABULARY), token_ids()
    prompt, total = int32(9, 4, 1, 1, 5, 15), int32(12, 30, 1, 1, 6, 30)
    words = torch.zeros(SLOTS, 16, dtype=torch.int32)
    end = all_ids[1, 28:30].tolist()
    words[1, :9] = int32(42, *end, 43, *[end[1], 44], 1, 2, 45)  # one token; a match of two; of one; none
    words[4, :4] = int32(*all_ids[4, 3:6].tolist(), 46)  # longer than the output
    words[5, :3] = int32(int(all_ids[5, 29]), 50, 47)  # ends in a draft
    offsets = torch.zeros(SLOTS, 8, dtype=torch.int32)
    offsets[1, :5] = int32(0, 1, 4, 6, 9)
    offsets[4, :2] = int32(0, 4)
    offsets[5, :2] = int32(0, 3)
    idx, place = int32(4, 1, 5, 5), int32(0, 0, 0, 1)
    bad_words.apply_bad_words(
        logits, idx, words, offsets, int32(0, 4, 0, 0, 1, 1), all_ids, prompt, total, int32(1, 2, 3, 50), place, 4
    )
    return {"logits": logits}


@case
def log_probabilities() -> Outputs:
    found = {}
    state = logprob.LogprobTokenIdsState(SLOTS, CPU)
    state.add_request(1, SamplingParams(logprob_token_ids=[5, 9, 50, 3]))
    state.apply_staged_writes()
    logits, sampled = 3 * torch.randn(4, VOCABULARY), torch.randint(0, VOCABULARY, (4,))
    for name, count, named in (("top", 5, 0), ("sampled", 0, 0), ("named", 2, 4), ("only named", 0, 4)):
        scores = logprob.compute_topk_scores(logits, count, sampled, None, state, IDX, named)
        found |= {
            f"{name} ids": scores.logprob_token_ids,
            f"{name} logprobs": scores.logprobs,
            f"{name} ranks": scores.selected_token_ranks,
        }
    found["prompt"] = prompt_logprob.get_prompt_logprobs_token_ids(14, STARTS, IDX, COMPUTED, token_ids())
    return found


@case
def sampling_masks() -> Outputs:
    logits = torch.randn(6, VOCABULARY)
    logits[torch.rand(6, VOCABULARY) < 0.8] = -torch.inf
    found = {}
    for rows in (1, 3):
        masks = SamplingMaskTensors.from_logits(logits, int32(0, 1, 2, 5, 6), int32(0, 1, rows, 1), 12, rows)
        counts = masks.counts
        for row in range(len(counts)):  # what is behind the count was never written
            masks.token_ids[row, int(counts[row]) :] = 0
            masks.packed_mask[row] *= bool(counts[row])
        found |= {f"ids {rows}": masks.token_ids, f"bits {rows}": masks.packed_mask, f"counts {rows}": counts}
    return found


@case
def replayed_traces() -> Outputs:
    sampled = torch.arange(4) + 1000
    trace_replay.apply_trace_tokens(
        sampled,
        int32(4, 1, -1, 0),
        token_ids(),
        int32(5, 0, 0, 0, 9, 0),
        int32(12, 3, 0, 0, 7, 20),
        int32(4, 1, 0, 0, 5, 15),
    )
    return {"sampled": sampled}


def run(function: Callable[[], Outputs]) -> Outputs | str:
    """A case's outputs, or the traceback."""
    torch.manual_seed(0)
    np.random.seed(0)
    try:
        return {name: tensor.clone() for name, tensor in function().items()}
    except Exception:
        return traceback.format_exc()


def difference(expected: Outputs | str, found: Outputs | str) -> str:
    """What differs, or nothing."""
    if isinstance(expected, str) or isinstance(found, str):
        return f"interpreted: {expected}\nreplaced: {found}"
    wrong = []
    for name, tensor in expected.items():
        other = found[name]
        same = (
            torch.equal(tensor, other)
            if not tensor.is_floating_point()
            else bool(torch.allclose(tensor.float(), other.float(), rtol=1e-6, atol=2e-6))
        )
        if not same or tensor.dtype != other.dtype:
            wrong.append(f"{name}:\n{tensor}\nnot\n{other}")
    return "\n".join(wrong)


def main() -> None:
    """Every case twice."""
    from omni_platform_cpu.registration import RUNNER, register

    interpreted = {name: run(function) for name, function in CASES.items()}
    register(RUNNER)
    results = {name: difference(interpreted[name], run(function)) for name, function in CASES.items()}
    print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
