"""TI2V-5B and I2V A14B against diffusers: with and without images, alone and together with others."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import pytest
import torch
from wan22_support import (
    FAR,
    TI2V,
    TOLERANCE,
    TWO_EXPERTS,
    difference,
    generate,
    generate_together,
    image_pipeline,
    perturbed,
    picture,
    reference_video,
)

from omni_core.errors import RequestError

TI2V_IMAGE = {**TI2V, "image": picture(1)}
I2V = {**TWO_EXPERTS, "image": picture(1)}
BETWEEN = {**I2V, "last_image": picture(2)}


def pipeline(kind, values, **options):
    """A fresh reference for the fields."""
    from omni_plugin_wan22.checkpoints import build_pipeline

    built = build_pipeline(kind=kind, **options)
    return image_pipeline(built) if kind == "ti2v-5b" and "image" in values else built


CASES = [
    ("ti2v-5b", TI2V),
    ("ti2v-5b", {**TI2V, "guidance_scale": 1.0, "negative_prompt": "", "num_frames": 1}),
    ("ti2v-5b", {**TI2V, "flow_shift": 8.0, "num_inference_steps": 3, "num_frames": 17}),
    ("ti2v-5b", TI2V_IMAGE),
    ("ti2v-5b", {**TI2V_IMAGE, "guidance_scale": 1.0, "negative_prompt": "", "num_frames": 13, "height": 96}),
    ("ti2v-5b", {**TI2V_IMAGE, "num_frames": 1}),
    ("ti2v-5b", {**TI2V_IMAGE, "num_inference_steps": 30, "flow_shift": 3.0, "image": picture(1, 300, 20)}),
    ("i2v-a14b", I2V),
    ("i2v-a14b", BETWEEN),
    ("i2v-a14b", {**I2V, "num_frames": 1, "height": 48, "guidance_scale_2": None}),
    ("i2v-a14b", {**BETWEEN, "num_frames": 5, "boundary_ratio": 0.5, "flow_shift": 5.0}),
    ("i2v-a14b", {**BETWEEN, "num_frames": 21, "guidance_scale": 1.0, "guidance_scale_2": None, "negative_prompt": ""}),
]


@pytest.mark.parametrize(("kind", "values"), CASES)
def test_a_request_gives_the_references_video(model_of, parser_of, kind, values):
    ours = generate(model_of(kind), parser_of(kind)(**values))
    assert difference(ours, reference_video(pipeline(kind, values), values)) <= TOLERANCE


def test_text_and_image_to_video_share_forwards(model_of, parser_of):
    """Given requests with and without an image that come and go, when they run together, none shows it."""
    others = [TI2V, {**TI2V_IMAGE, "image": picture(3), "seed": 9, "num_inference_steps": 11}, {**TI2V, "width": 64}]
    values = [TI2V_IMAGE, *others, {**TI2V_IMAGE, "guidance_scale": 1.0, "negative_prompt": ""}]
    arrivals = [(when, parser_of("ti2v-5b")(**fields)) for when, fields in zip((0, 2, 1, 0, 3), values, strict=True)]

    videos, sizes = generate_together(model_of("ti2v-5b"), arrivals)

    assert max(sizes) == 4
    for i, video in videos.items():
        assert difference(video, reference_video(pipeline("ti2v-5b", values[i]), values[i])) <= TOLERANCE


def test_image_requests_of_two_experts_share_forwards(model_of, parser_of):
    values = [I2V, {**BETWEEN, "seed": 9, "num_inference_steps": 11}, {**BETWEEN, "image": picture(3), "seed": 10}]
    arrivals = [(when, parser_of("i2v-a14b")(**fields)) for when, fields in zip((0, 0, 2), values, strict=True)]

    videos, sizes = generate_together(model_of("i2v-a14b"), arrivals)

    assert max(sizes) == 3
    for i, video in videos.items():
        assert difference(video, reference_video(pipeline("i2v-a14b", values[i]), values[i])) <= TOLERANCE


def test_requests_decode_and_start_by_turns(model_of, parser_of):
    """The VAE's caches belong to each request: chunks of one between those of another change neither."""
    model = model_of("ti2v-5b")
    requests = [parser_of("ti2v-5b")(**{**TI2V_IMAGE, "seed": seed, "image": picture(seed)}) for seed in (1, 2)]
    with torch.inference_mode():
        states = [model.begin(request) for request in requests]
        alone = [list(model.decode(state)) for state in states]
        by_turns: list[list[torch.Tensor]] = [[], []]
        for chunks in zip(*(model.decode(state) for state in states), strict=True):
            model.begin(requests[0])
            for kept, chunk in zip(by_turns, chunks, strict=True):
                kept.append(chunk)
    for one, other in zip(alone, by_turns, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "values", "pieces"), [("i2v-a14b", BETWEEN, 3), ("ti2v-5b", TI2V_IMAGE, 1)])
def test_images_are_encoded_in_pieces_between_which_others_run(model_of, parser_of, kind, values, pieces):
    """Given two requests encoded by turns and steps of a third between, each has what diffusers encodes in one go."""
    model, parse = model_of(kind), parser_of(kind)
    requests = [parse(**{**values, "num_frames": 9, "image": picture(seed)}) for seed in (1, 2)]
    with torch.inference_mode():
        other = model.begin(parse(**values))
        expected = [model.begin(request) for request in requests]
        states = [model.start(request) for request in requests]
        turns = list(zip_longest(*(_prepared_beside(model, state, other) for state in states)))
        assert len(turns) == pieces, "others run after each latent frame"
    for state, alone in zip(states, expected, strict=True):
        assert torch.equal(state.network_input, alone.network_input)


def _prepared_beside(model, state, other):
    for _ in model.prepare(state):
        assert state.condition is None
        model.predict([other])
        yield


def forget_the_timesteps(pipeline):
    """The given frame at the timestep of the others."""
    forward = pipeline.transformer.forward

    def per_video(timestep, **inputs):
        return forward(timestep=timestep.amax(dim=1), **inputs)

    pipeline.transformer.forward = per_video


def forget_the_image(pipeline):
    pipeline.vae.quant_conv.weight.zero_()


def forget_the_mask(pipeline):
    for expert in (pipeline.transformer, pipeline.transformer_2):
        expert.patch_embedding.weight[:, 16:20] = 0


@pytest.mark.parametrize(
    ("kind", "values", "damage"),
    [
        ("ti2v-5b", TI2V_IMAGE, forget_the_timesteps),
        ("ti2v-5b", TI2V_IMAGE, forget_the_image),
        ("i2v-a14b", I2V, forget_the_image),
        ("i2v-a14b", I2V, forget_the_mask),
    ],
)
def test_a_damaged_model_is_far_off(model_of, parser_of, kind, values, damage):
    ours = generate(model_of(kind), parser_of(kind)(**values))
    assert difference(ours, reference_video(perturbed(pipeline(kind, values), damage), values)) > FAR


@pytest.mark.parametrize(
    ("kind", "values", "change"),
    [
        ("ti2v-5b", TI2V_IMAGE, {"image": picture(2)}),
        ("ti2v-5b", TI2V_IMAGE, {"image": None}),
        ("ti2v-5b", TI2V_IMAGE, {"seed": 8}),
        ("i2v-a14b", BETWEEN, {"image": picture(2)}),
        ("i2v-a14b", BETWEEN, {"last_image": picture(3)}),
        ("i2v-a14b", BETWEEN, {"last_image": None}),
    ],
)
def test_every_image_has_an_effect(model_of, parser_of, kind, values, change):
    first, second = (generate(model_of(kind), parser_of(kind)(**{**values, **more})) for more in ({}, change))
    assert difference(first, second) > FAR


def test_the_given_frame_comes_back_whatever_the_noise(model_of, parser_of):
    first, second = (
        generate(model_of("ti2v-5b"), parser_of("ti2v-5b")(**{**TI2V_IMAGE, "seed": seed})) for seed in (1, 2)
    )
    assert np.array_equal(first[0], second[0]) and difference(first, second) > FAR


def test_timesteps_are_per_frame_only_where_a_frame_is_given(model_of, parser_of):
    from omni_plugin_wan22.model import _timesteps

    with torch.inference_mode():
        text, image = (model_of("ti2v-5b").begin(parser_of("ti2v-5b")(**fields)) for fields in (TI2V, TI2V_IMAGE))
    assert _timesteps([text, text]).tolist() == [[999.0], [999.0]]
    assert _timesteps([text, image]).tolist() == [[999.0] * 3, [0.0, 999.0, 999.0]]


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        ("i2v-a14b", {}, "image", "image is required"),
        ("i2v-a14b", {"image": "cat.png"}, "image", "must be an image"),
        ("i2v-a14b", {**I2V, "num_frames": 1, "last_image": picture(2)}, "last_image", "needs more than one frame"),
        ("ti2v-5b", {"last_image": picture(2)}, "last_image", "unknown parameter"),
        ("ti2v-5b", {"width": 1264}, "width", "multiple of 32"),
        ("t2v-a14b", {"image": picture(1)}, "image", "unknown parameter"),
        ("dmd", {"image": picture(1)}, "image", "unknown parameter"),
    ],
)
def test_a_bad_image_is_refused_by_name(parser_of, kind, fields, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        parser_of(kind)(**{"prompt": "a cat", **fields})
    assert caught.value.param == param


def test_defaults_are_those_of_the_kind(parser_of):
    ti2v, i2v = parser_of("ti2v-5b")(prompt="x"), parser_of("i2v-a14b")(prompt="x", image=picture(1))
    assert (ti2v.width, ti2v.height, ti2v.num_frames, ti2v.fps) == (1280, 704, 121, 24)
    assert (ti2v.num_inference_steps, ti2v.guidance_scale, ti2v.flow_shift, ti2v.image) == (50, 5.0, 5.0, None)
    assert (i2v.num_inference_steps, i2v.guidance_scale, i2v.boundary_ratio, i2v.last_image) == (40, 3.5, 0.9, None)
