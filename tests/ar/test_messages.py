"""What may be sent to a worker: plain data in range, and nothing that would end its engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from omni_core.ar.messages import MAX_SEED, Piece, TalkerJob, TokenSampling
from omni_core.ar.sampling import CodeSampling
from omni_core.vllm.ar.channel import pack_codes, unpack_codes

PROMPT = {"text": [1, 2], "voice": b"\x00", "nested": {"a": (1.5, None, True)}, "name": "x"}


def job(**changes):
    return TalkerJob(**{"prompt": PROMPT, "prompt_length": 2, **changes})


def test_plain_data_is_taken():
    assert job(text=[0, 2**31 - 1], seed=MAX_SEED - 1, max_frames=1, min_frames=0).prompt == PROMPT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1), ("seed", MAX_SEED), ("seed", 1.0), ("seed", True), ("seed", np.int64(3)), ("seed", None),
        ("prompt_length", 0), ("prompt_length", "2"), ("max_frames", 0), ("max_frames", math.inf), ("min_frames", -1),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be an integer, .* got "):
        job(**{field: value})


@pytest.mark.parametrize("text", [[-1], [2**31], [1.0], ["a"], [None], np.array([1, 2])], ids=repr)
def test_text_that_is_no_ids_is_refused(text):
    with pytest.raises(ValueError, match="text ids must be integers"):
        job(text=text)


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ({"rows": np.zeros(3)}, r"prompt\['rows'\]"),
        ({"rows": [1, {"deep": torch.zeros(3)}]}, r"prompt\['rows'\]\[1\]\['deep'\]"),
        ({"rows": {1: 2}}, r"prompt\['rows'\]"),
        ({"rows": {1, 2}}, r"prompt\['rows'\]"),
        ({"rows": memoryview(b"")}, r"prompt\['rows'\]"),
        ({"rows": np.float32(1)}, r"prompt\['rows'\]"),
        ([("a", object())], r"prompt\[0\]\[1\]"),
    ],
)
def test_what_is_no_plain_data_is_refused(prompt, where):
    with pytest.raises(ValueError, match=f"{where} must be numbers, strings, bytes"):
        job(prompt=prompt)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0},
        {"top_p": 1.1}, {"repetition_penalty": 0.0}, {"repetition_penalty": math.nan},
    ],
)  # fmt: skip
def test_sampling_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        TokenSampling(**bad)


def test_a_piece_comes_back_as_it_was_sent():
    piece = Piece("k", PROMPT, 2, 7, CodeSampling(top_k=3), TokenSampling(top_p=0.5), 3, [4, 5], ["a"])
    assert Piece.from_extra_args(piece.to_extra_args()) == piece


@pytest.mark.parametrize("arguments", [None, {}, {"other": 1}])
def test_what_is_no_piece_is_none(arguments):
    assert Piece.from_extra_args(arguments) is None


def test_codes_come_back_and_no_two_of_a_frame_are_equal_on_the_way():
    codes = torch.tensor([[5, 5, 5, 0], [2**15 - 1, 0, 2**15 - 1, 7]])
    packed = pack_codes(codes)
    assert packed.dtype == torch.int32 and torch.equal(packed[:, 0], codes[:, 0].int())
    assert all(len(set(frame)) == 4 for frame in packed.tolist())
    np.testing.assert_array_equal(unpack_codes(packed.flatten().tolist(), 4), codes.numpy())
    assert unpack_codes([], 16).shape == (0, 16)


def test_codes_survive_vllm_s_joining_of_outputs():
    """It joins what a slow client has not read yet position by position, as dictionaries of tokens."""
    from vllm.logprobs import FlatLogprobs

    codes = torch.tensor([[5, 5, 5, 0], [1, 2, 1, 2]])
    outputs = []
    for frame in pack_codes(codes).tolist():
        outputs.append(FlatLogprobs())
        outputs[-1].append_fast(frame, [0.0] * 4, [0] * 4, [None] * 4)
    first, second = outputs
    first.extend(second)
    np.testing.assert_array_equal(unpack_codes(first.token_ids, 4), codes.numpy())
