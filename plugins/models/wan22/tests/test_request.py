"""The request model: what is accepted, what is refused with which field, and the defaults."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_core.errors import RequestError
from omni_plugin_wan22.request import MAX_AREA, MAX_FRAMES


def test_defaults_of_two_experts(parse):
    request = parse(prompt="a cat")
    assert request.model_dump() == {
        "prompt": "a cat",
        "negative_prompt": "",
        "width": 832,
        "height": 480,
        "num_frames": 81,
        "fps": 16,
        "num_inference_steps": 40,
        "guidance_scale": 4.0,
        "guidance_scale_2": None,
        "boundary_ratio": 0.875,
        "flow_shift": 3.0,
        "sample_solver": "unipc",
        "max_sequence_length": 512,
        "seed": None,
    }
    assert request.guidance == (4.0, 4.0) and request.expert_boundary == 0.875


def test_defaults_of_one_expert(parse_one):
    request = parse_one(prompt="a cat")
    assert (request.num_inference_steps, request.guidance_scale) == (50, 5.0)
    assert request.guidance == (5.0, 5.0) and request.expert_boundary is None


def test_the_second_scale_is_the_low_noise_experts(parse):
    assert parse(prompt="a cat", guidance_scale_2=0.0).guidance == (4.0, 0.0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", " \n", "must not be blank"),
        ("prompt", "x" * 5001, "at most 5000 characters"),
        ("negative_prompt", "x" * 5001, "at most 5000 characters"),
        ("width", 830, "multiple of 16"),
        ("width", 0, "greater than or equal to 16"),
        ("width", 1040, "less than or equal to 1024"),
        ("width", "832", "valid integer"),
        ("width", 832.0, "valid integer"),
        ("height", 700, "multiple of 16"),
        ("num_frames", 48, "4k\\+1"),
        ("seed", random.Random(7), "valid integer"),
        ("height", True, "valid integer"),
        ("num_frames", 80, "nearest: 77 or 81"),
        ("num_frames", 245, "less than or equal to 241"),
        ("fps", 0, "greater than or equal to 1"),
        ("num_inference_steps", 0, "greater than or equal to 1"),
        ("num_inference_steps", 1001, "less than or equal to 1000"),
        ("guidance_scale", -1.0, "greater than or equal to 0"),
        ("guidance_scale", float("nan"), "finite number"),
        ("guidance_scale_2", 51.0, "less than or equal to 50"),
        ("boundary_ratio", 1.5, "less than or equal to 1"),
        ("boundary_ratio", None, "valid number"),
        ("flow_shift", 0.0, "greater than or equal to 0.1"),
        ("max_sequence_length", 513, "less than or equal to 512"),
        ("seed", -1, "greater than or equal to 0"),
        ("seed", 2**63, "less than or equal to"),
        ("guidance", 3.0, "did you mean 'guidance_scale'"),
    ],
)
def test_a_bad_value_is_refused_by_name(parse, field, value, message):
    with pytest.raises(RequestError, match=message) as caught:
        parse(**{"prompt": "a cat", field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["guidance_scale_2", "boundary_ratio"])
def test_one_expert_has_no_fields_for_a_second(parse_one, field):
    with pytest.raises(RequestError, match=f"unknown parameter '{field}'") as caught:
        parse_one(**{"prompt": "a cat", field: 0.5})
    assert caught.value.param == field


@pytest.mark.parametrize("fields", [{"negative_prompt": "bad"}, {"guidance_scale_2": 3.0}], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_what_guidance_alone_would_use_is_refused_without_it(parse, fields, scale):
    with pytest.raises(RequestError, match="has no effect without guidance") as caught:
        parse(prompt="a cat", guidance_scale=scale, **fields)
    assert caught.value.param in fields


def test_limits_follow_the_checkpoint(two_experts, tmp_path):
    from omni_core.checkpoint import Checkpoint
    from omni_core.requests import parse_request
    from omni_plugin_wan22.request import request

    folder = shutil.copytree(two_experts, tmp_path / "copy")
    for name in ("transformer", "transformer_2"):
        file = folder / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "rope_max_seq_len": 1024}))
    kind = request(Checkpoint(folder))
    assert parse_request(kind, {"prompt": "x", "width": 1920, "height": 1088}).width == 1920
    with pytest.raises(RequestError, match=f"at most {MAX_AREA} pixels, 2048x2048 has 4194304") as caught:
        parse_request(kind, {"prompt": "x", "width": 2048, "height": 2048})
    assert caught.value.param == "height"

    for name in ("transformer", "transformer_2"):
        file = folder / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "rope_max_seq_len": 16}))
    small = parse_request(request(Checkpoint(folder)), {"prompt": "x"})
    assert (small.width, small.height, small.num_frames) == (256, 256, 61)


numbers = st.one_of(st.integers(-5, 1100), st.sampled_from([81, 480, 832, 16, 17, 1.5, None, "16", True]))
scales = st.one_of(st.floats(-2, 60), st.sampled_from([None, float("inf"), "4", 1, 4.0]))
fields = st.fixed_dictionaries(
    {"prompt": st.one_of(st.just("a cat"), st.text(max_size=5))},
    optional={
        "width": numbers,
        "height": numbers,
        "num_frames": numbers,
        "fps": numbers,
        "num_inference_steps": numbers,
        "max_sequence_length": numbers,
        "seed": numbers,
        "guidance_scale": scales,
        "guidance_scale_2": scales,
        "boundary_ratio": scales,
        "flow_shift": scales,
        "negative_prompt": st.sampled_from(["", "bad"]),
        "colour": st.just(1),
    },
)


@settings(max_examples=300, deadline=None)
@given(values=fields)
def test_whatever_is_accepted_can_be_run_and_whatever_is_not_is_named(parse, values):
    try:
        request = parse(**values)
    except RequestError as error:
        assert error.param in values and str(error)
        return
    assert request.width % 16 == 0 and request.height % 16 == 0
    assert 0 < request.width * request.height <= MAX_AREA and max(request.width, request.height) <= 1024
    assert request.num_frames % 4 == 1 and request.num_frames <= MAX_FRAMES
    assert 1 <= request.num_inference_steps <= 1000 and 1 <= request.max_sequence_length <= 512
    assert all(0 <= scale <= 50 for scale in request.guidance)
    assert 0 <= request.boundary_ratio <= 1 and request.flow_shift > 0
    guided = request.guidance_scale > 1
    assert guided or not (request.negative_prompt or request.guidance_scale_2)
    assert {k: v for k, v in request.model_dump().items() if k in values} == values
