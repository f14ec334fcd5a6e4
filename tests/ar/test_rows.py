"""What a worker keeps of requests: rows that grow, come back, and are given up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_core.ar.messages import Piece, TokenSampling
from omni_core.ar.sampling import CodeSampling
from omni_core.vllm.ar.slots import Rows

SLOTS = 2


@pytest.fixture
def rows():
    return Rows(SLOTS, max_frames=10, num_groups=4, vocabulary=20, device=torch.device("cpu"))


def piece(key, **changes):
    values = {"key": key, "prompt": {}, "prompt_length": 3, "seed": 5, "codes": CodeSampling()}
    return Piece(**{**values, **changes})


def settings(rows, slot):
    """What the device knows of a slot's request."""
    rows.apply()
    row = rows.slot_rows[slot]
    return {name: getattr(rows, name)[row].item() for name in rows.INTEGERS + rows.REALS}


def test_a_slot_has_what_its_request_brought(rows):
    sampling = CodeSampling(temperature=0.7, top_k=7, top_p=0.25)
    tokens = TokenSampling(temperature=0.5, top_k=9, top_p=0.75, repetition_penalty=1.25)
    request = rows.add(1, piece("a", seed=2**61 + 1, codes=sampling, tokens=tokens, min_frames=4, text=[4, 5]))
    assert settings(rows, 1) == {
        "prompt_length": 3, "text_length": 2, "seed": 2**61 + 1, "temperature": pytest.approx(0.7), "top_k": 7,
        "top_p": 0.25, "penalty": 1.25, "token_temperature": 0.5, "token_top_k": 9, "token_top_p": 0.75,
        "min_frames": 4,
    }  # fmt: skip
    assert rows.text[request.row, :2].tolist() == [4, 5]
    assert rows.slot_rows[0] == rows.nobody


def test_a_request_that_comes_back_in_another_slot_finds_what_it_left(rows):
    row = rows.add(0, piece("a")).row
    rows.codes[row, 3] = 7
    rows.seen[row, 9] = True
    rows.add(0, piece("b"))
    assert rows.add(1, piece("a")).row == row
    rows.apply()
    assert rows.slot_rows[:SLOTS].tolist() == [rows.requests["b"].row, row]
    assert rows.codes[row, 3, 0] == 7 and rows.seen[row, 9]


def test_more_text_takes_the_place_of_what_was_known(rows):
    row = rows.add(0, piece("a", text=[1])).row
    rows.add(0, piece("a", text=[1, 2, 3], seed=6))
    assert settings(rows, 0)["text_length"] == 3 and settings(rows, 0)["seed"] == 6
    assert rows.text[row, :3].tolist() == [1, 2, 3]


def test_text_beyond_the_frames_there_can_be_is_left_out(rows):
    rows.add(0, piece("a", text=range(50)))
    assert settings(rows, 0)["text_length"] == 10


def test_rows_grow_and_keep_what_they_hold(rows):
    before = rows.nobody
    taken = [rows.add(number % SLOTS, piece(str(number))) for number in range(before)]
    for request in taken:
        rows.codes[request.row] = request.row + 1
    rows.codes[rows.nobody] = 99
    last = rows.add(0, piece("last"))
    assert rows.nobody > before and rows.requests["last"] is last
    assert len({*(request.row for request in taken), last.row, rows.nobody}) == before + 2
    for request in taken:
        assert (rows.codes[request.row] == request.row + 1).all()
    assert len(rows.text) == len(rows.seen) == len(rows.codes) == rows.nobody + 1


def test_slots_of_nobody_stay_with_nobody_when_rows_grow(rows):
    for number in range(rows.nobody + 1):
        rows.add(0, piece(str(number)))
    rows.apply()
    assert rows.slot_rows[1] == rows.nobody


def test_a_slot_can_be_nobody_s(rows):
    rows.add(0, piece("a"))
    rows.add_nobody(0)
    rows.apply()
    assert rows.slot_rows[0] == rows.nobody
    assert settings(rows, 0) == {
        "prompt_length": 0, "text_length": 0, "seed": 0, "temperature": 0, "top_k": 0, "top_p": 1, "penalty": 1,
        "token_temperature": 0, "token_top_k": 0, "token_top_p": 1, "min_frames": 0,
    }  # fmt: skip


def test_what_has_ended_is_given_up_and_its_row_starts_anew(rows):
    row = rows.add(0, piece("a", text=[1, 2])).row
    rows.seen[row, 9] = True
    free = rows.nobody - 1
    for number in range(free - 1):
        rows.add(1, piece(f"filler {number}"))
    assert rows.add(0, piece("b", ended=("a", "unknown"))).row == row, "the only free one"
    assert "a" not in rows.requests and not rows.seen[row].any()
    assert settings(rows, 0)["text_length"] == 0


def test_forgetting_twice_frees_once(rows):
    rows.add(0, piece("a"))
    free = len(rows._free)
    rows.forget("a")
    rows.forget("a")
    assert len(rows._free) == free + 1


def test_rows_stay_as_many_when_requests_come_and_go(rows):
    random = np.random.default_rng(0)
    alive, told, most = [], [], rows.nobody
    for number in range(500):
        rows.add(number % SLOTS, piece(str(number), ended=tuple(told)))
        told = []
        alive.append(str(number))
        while len(alive) > 2 or (alive and random.random() < 0.4):
            told.append(alive.pop(random.integers(len(alive))))
        rows_of = [request.row for request in rows.requests.values()]
        assert len(set(rows_of)) == len(rows_of) and not set(rows_of) & set(rows._free)
    assert rows.nobody == most


def test_the_penalty_is_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    from omni_core.vllm.ar.frames import FrameSteps

    logits = 3 * torch.randn(SLOTS, 20, generator=torch.Generator().manual_seed(0))
    logits[:, 5] = -torch.inf
    drawn, penalties = [[1, 5, 9, 9], [2]], [1.3, 0.8]
    seen = torch.zeros(SLOTS, 20, dtype=torch.bool)
    for row in range(SLOTS):
        seen[row, drawn[row]] = True
    found = FrameSteps._penalise(logits, seen, torch.tensor(penalties))
    for row in range(SLOTS):
        processor = RepetitionPenaltyLogitsProcessor(penalties[row])
        expected = processor(torch.tensor([drawn[row]]), logits[row : row + 1])[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=0)


def test_whoever_records_addresses_is_told_when_they_change(rows):
    told = []
    rows.on_move = lambda: told.append(rows.codes.data_ptr())
    before = {name: getattr(rows, name).data_ptr() for name in ("codes", "text", "seen", "integers", "reals")}
    for number in range(2 * SLOTS):
        rows.add(number % SLOTS, piece(str(number)))
        rows.apply()
    assert before == {name: getattr(rows, name).data_ptr() for name in before} and not told
    rows.add(0, piece("one more"))
    assert told == [rows.codes.data_ptr()] and told[0] != before["codes"]
