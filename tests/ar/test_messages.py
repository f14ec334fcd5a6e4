"""What may be sent to a worker: plain data in range, and nothing that would end its engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from omni_core.ar.messages import MAX_SEED, Piece, TalkerJob, TokenSampling
from omni_core.ar.sampling import CodeSampling
from omni_core.vllm.ar.channel import CodesOnly, keep_codes_only, pack_codes, unpack_codes

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
    prompt = {**PROMPT, "nested": {"a": [1.5, None, True]}}  # tuples come back as lists
    piece = Piece("k", prompt, 2, 7, CodeSampling(top_k=3), TokenSampling(top_p=0.5), 3, [4, 5], ["a"])
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


@pytest.mark.parametrize("interval", [1, 3])
def test_codes_come_through_vllm_s_output_processor_read_or_not(interval):
    """As ``TalkerEngine`` uses it; a reader that takes nothing until the end gets everything at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.outputs import LogprobsLists

    codes = np.random.default_rng(0).integers(0, 2048, (8, 2, 4))
    processor = OutputProcessor(None, log_stats=False)
    keep_codes_only(processor)
    parameters = SamplingParams(
        max_tokens=8, logprobs=3, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA,
        stream_interval=interval,
    )  # fmt: skip
    queues = {name: RequestOutputCollector(RequestOutputKind.DELTA, name) for name in ("read", "late")}
    for name, queue in queues.items():
        request = EngineCoreRequest(
            request_id=name, external_req_id=name, prompt_token_ids=[0], mm_features=None, sampling_params=parameters,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        processor.add_request(request, None, queue=queue)
    seen = []
    for step, of_both in enumerate(codes):
        tokens = pack_codes(torch.from_numpy(of_both)).numpy()
        lists = LogprobsLists(tokens, np.zeros((2, 4), np.float32), np.zeros(2, np.int32))
        reason = FinishReason.LENGTH if step == 7 else None
        processor.process_outputs(
            [
                EngineCoreOutput(name, [int(tokens[index, 0])], lists.slice_request(index, 1), finish_reason=reason)
                for index, name in enumerate(queues)
            ]
        )
        if (output := queues["read"].get_nowait()) is not None:
            seen.append(output)
    sizes = [len(output.outputs[0].token_ids) for output in seen]
    assert sizes == ([1] * 8 if interval == 1 else [1, 3, 3, 1])
    for index, outputs in enumerate((seen, [queues["late"].get_nowait()])):
        found = [unpack_codes(output.outputs[0].logprobs.token_ids, 4) for output in outputs]
        np.testing.assert_array_equal(np.concatenate(found), codes[:, index])
        assert outputs[-1].finished


def test_an_abort_brings_no_codes_again():
    codes = CodesOnly(object())
    codes.logprobs.append(b"1234")
    assert len(codes.logprobs[-1:]) == 1
    assert codes.logprobs[:0].token_ids == b"" and codes.logprobs, "vLLM takes a slice of what is true"
