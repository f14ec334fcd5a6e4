"""The whole model against diffusers' WanPipeline: the same fields and seed give the same video, alone or together."""

from __future__ import annotations

import copy

import pytest
import torch
from wan22_support import (
    BASE,
    FAR,
    ONE_EXPERT,
    TOLERANCE,
    TWO_EXPERTS,
    difference,
    generate,
    generate_together,
    perturbed,
    reference_video,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"negative_prompt": "", "prompt": "  caf&eacute; &amp;amp; Ünïcödé\n\n in   the\train "},
        {"guidance_scale": 1.0, "guidance_scale_2": None, "negative_prompt": ""},
        {"guidance_scale": 0.5, "guidance_scale_2": None, "negative_prompt": ""},
        {"guidance_scale_2": None},
        {"guidance_scale_2": 1.0},
        {"guidance_scale_2": 6.5},
        {"flow_shift": 8.0},
        {"boundary_ratio": 0.5},
        {"boundary_ratio": 0.0},
        {"boundary_ratio": 1.0},
        {"num_inference_steps": 1},
        {"num_inference_steps": 30, "width": 32},
        {"num_frames": 1, "width": 64, "height": 48},
        {"num_frames": 17, "width": 128, "height": 96, "num_inference_steps": 3},
        {"max_sequence_length": 8},
        {"max_sequence_length": 512, "num_inference_steps": 2},
    ],
    ids=str,
)
def test_a_request_gives_the_references_video(model, reference, parse, change):
    values = {**TWO_EXPERTS, **change}
    assert difference(generate(model, parse(**values)), reference_video(reference, values)) <= TOLERANCE


@pytest.mark.parametrize("change", [{}, {"guidance_scale": 1.0, "negative_prompt": ""}, {"flow_shift": 5.0}], ids=str)
def test_a_checkpoint_with_one_expert_gives_the_references_video(
    one_expert_model, one_expert_reference, parse_one, change
):
    values = {**ONE_EXPERT, **change}
    ours = generate(one_expert_model, parse_one(**values))
    assert difference(ours, reference_video(one_expert_reference, values)) <= TOLERANCE


def test_requests_that_share_forwards_are_as_they_are_alone(model, reference, parse):
    """Given requests of other lengths, guidance and prompts that come and go, when they run together, none shows it."""
    others = [
        {"num_inference_steps": 12, "guidance_scale": 6.0, "prompt": "a red car", "seed": 1},
        {"guidance_scale": 1.0, "guidance_scale_2": None, "negative_prompt": "", "seed": 2},
        {"num_inference_steps": 20, "seed": 3, "prompt": "dropped midway"},
        {"width": 64, "seed": 4},
        {"max_sequence_length": 32, "seed": 5},
    ]
    values = [TWO_EXPERTS, *({**TWO_EXPERTS, **other} for other in others)]
    arrivals = [(when, parse(**fields)) for when, fields in zip((0, 2, 3, 0, 1, 4), values, strict=True)]

    videos, sizes = generate_together(model, arrivals, dropped_after={3: 5})

    assert max(sizes) >= 3
    assert sorted(videos) == [0, 1, 2, 4, 5]
    for i, video in videos.items():
        assert difference(video, reference_video(copy.deepcopy(reference), values[i])) <= TOLERANCE


def test_predict_leaves_the_states_alone(model, parse):
    with torch.inference_mode():
        states = [model.begin(parse(**TWO_EXPERTS)), model.begin(parse(**{**TWO_EXPERTS, "seed": 8}))]
        before = [(s.latents.clone(), s.step, s.sampler.scheduler.step_index) for s in states]
        first, second = model.predict(states), model.predict(states)
    for state, (latents, step, index) in zip(states, before, strict=True):
        assert torch.equal(state.latents, latents) and (state.step, state.sampler.scheduler.step_index) == (step, index)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_requests_at_different_experts_have_different_keys(model, parse):
    with torch.inference_mode():
        state = model.begin(parse(**TWO_EXPERTS))
    keys = []
    for step in range(state.num_steps):
        state.step = step
        keys.append(model.batch_key(state))
    assert len(set(keys)) == 2
    assert [t >= 875 for t in state.sampler.timesteps.tolist()] == [key == keys[0] for key in keys]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"prompt": "A cat & a dog run in the rain"},
        {"negative_prompt": "bad"},
        {"num_inference_steps": 7},
        {"guidance_scale": 4.1},
        {"guidance_scale_2": 3.1},
        {"flow_shift": 3.2},
        {"boundary_ratio": 0.7},
        {"max_sequence_length": 16},
    ],
    ids=str,
)
def test_every_field_has_an_effect(model, reference, parse, change):
    ours = generate(model, parse(**{**TWO_EXPERTS, **change}))
    assert difference(ours, reference_video(reference, TWO_EXPERTS)) > FAR


def drop_a_layer(pipeline):
    del pipeline.transformer.blocks[1]


def zero_half_a_feed_forward(pipeline):
    down = pipeline.transformer_2.blocks[1].ffn.net[2].weight
    down[:, down.shape[1] // 2 :] = 0


def zero_half_the_heads(pipeline):
    out = pipeline.transformer.blocks[0].attn1.to_out[0].weight
    out[:, out.shape[1] // 2 :] = 0


def swap_the_experts(pipeline):
    pipeline.transformer, pipeline.transformer_2 = pipeline.transformer_2, pipeline.transformer


def forget_a_bias(pipeline):
    pipeline.transformer.blocks[2].attn2.to_v.bias.zero_()


@pytest.mark.parametrize(
    "damage", [drop_a_layer, zero_half_a_feed_forward, zero_half_the_heads, swap_the_experts, forget_a_bias]
)
def test_a_damaged_model_is_far_off(model, reference, parse, damage):
    ours = generate(model, parse(**TWO_EXPERTS))
    assert difference(ours, reference_video(perturbed(reference, damage), TWO_EXPERTS)) > FAR


def test_a_request_without_a_seed_is_refused(model, parse):
    with pytest.raises(ValueError, match="seed"):
        model.start(parse(**{k: v for k, v in BASE.items() if k != "seed"}))


def test_float16_is_refused(parallel, two_experts):
    from wan22_support import sdpa

    from omni_core.diffusion.contract import StageContext
    from omni_core.errors import ConfigError
    from omni_plugin_wan22.model import WanModel

    with pytest.raises(ConfigError, match="float32 or bfloat16, not float16"):
        WanModel.load(StageContext(two_experts, torch.device("cpu"), torch.float16, sdpa))
