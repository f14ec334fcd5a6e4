"""Euler against diffusers, few steps against a plain loop, and one expert where the boundary asks for no more."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from wan22_support import (
    BASE,
    FAR,
    TI2V,
    TOLERANCE,
    TWO_EXPERTS,
    difference,
    generate,
    generate_together,
    image_pipeline,
    picture,
    reference_video,
)

from omni_core.errors import RequestError

FEW_STEPS = {k: v for k, v in BASE.items() if k in ("prompt", "width", "height", "num_frames", "seed")}


def pipeline(kind, values, *, euler):
    """A fresh reference with the wanted scheduler."""
    from omni_plugin_wan22.checkpoints import build_pipeline

    built = build_pipeline(kind=kind, euler=euler)
    return image_pipeline(built) if kind == "ti2v-5b" and "image" in values else built


@pytest.mark.parametrize("saved_with_euler", [True, False])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("t2v-a14b", TWO_EXPERTS),
        ("t2v-a14b", {**TWO_EXPERTS, "num_inference_steps": 1, "flow_shift": 8.0}),
        ("t2v-2.1", {**BASE, "num_inference_steps": 20, "flow_shift": 5.0}),
        ("ti2v-5b", {**TI2V, "image": picture(1)}),
        ("i2v-a14b", {**TWO_EXPERTS, "image": picture(1)}),
    ],
)
def test_either_solver_gives_the_references_video(model_of, parser_of, kind, values, saved_with_euler):
    """Whichever of the two a checkpoint is saved with, a request can have both."""
    model, parse = model_of(kind, euler=saved_with_euler), parser_of(kind, euler=saved_with_euler)
    for solver in ("euler", "unipc"):
        ours = generate(model, parse(**values, sample_solver=solver))
        assert difference(ours, reference_video(pipeline(kind, values, euler=solver == "euler"), values)) <= TOLERANCE


def test_the_solver_has_an_effect_and_defaults_to_the_checkpoints(model_of, parser_of):
    assert parser_of("t2v-2.1", euler=True)(**BASE).sample_solver == "euler"
    assert parser_of("t2v-2.1", euler=True)(**BASE).flow_shift == 3.0
    assert parser_of("t2v-2.1")(**BASE).sample_solver == "unipc"
    videos = [generate(model_of("t2v-2.1"), parser_of("t2v-2.1")(**BASE, sample_solver=s)) for s in ("euler", "unipc")]
    assert difference(*videos) > FAR


def test_requests_of_either_solver_share_forwards(model_of, parser_of):
    values = [
        {**BASE, "sample_solver": solver, "seed": seed} for seed, solver in enumerate(("euler", "unipc", "euler"))
    ]
    arrivals = [(when, parser_of("t2v-2.1")(**fields)) for when, fields in zip((0, 0, 3), values, strict=True)]
    videos, sizes = generate_together(model_of("t2v-2.1"), arrivals)
    assert max(sizes) == 3
    for i, video in videos.items():
        euler = values[i]["sample_solver"] == "euler"
        assert difference(video, reference_video(pipeline("t2v-2.1", BASE, euler=euler), values[i])) <= TOLERANCE


def few_step_reference(values, *, shift=8.0, timesteps=(1000, 757, 522), fresh=True):
    """FastVideo's few steps as a plain loop around diffusers' transformer and VAE."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from omni_plugin_wan22.checkpoints import build_pipeline

    built = build_pipeline(kind="dmd")
    grid = FlowMatchEulerDiscreteScheduler(shift=shift)
    generator = torch.Generator().manual_seed(values["seed"])
    frames = (values["num_frames"] - 1) // 4 + 1
    x = noise = torch.randn((1, 16, frames, values["height"] // 8, values["width"] // 8), generator=generator)
    with torch.no_grad():
        text = built.encode_prompt(values["prompt"], do_classifier_free_guidance=False, max_sequence_length=512)[0]
        for step, t in enumerate(timesteps):
            v = built.transformer(x, torch.tensor([t]), text, return_dict=False)[0]
            clean = x - grid.sigmas[(grid.timesteps - t).abs().argmin()] * v
            if step + 1 < len(timesteps):
                if fresh:
                    noise = torch.randn(x.shape, generator=generator)
                sigma = grid.sigmas[(grid.timesteps - timesteps[step + 1]).abs().argmin()]
                x = sigma * noise + (1 - sigma) * clean
        mean, std = (
            torch.tensor(v).view(1, 16, 1, 1, 1) for v in (built.vae.config.latents_mean, built.vae.config.latents_std)
        )
        video = built.vae.decode(clean * std + mean, return_dict=False)[0]
    return (video[0].permute(1, 2, 3, 0) * 0.5 + 0.5).clamp(0, 1).numpy()


def test_few_steps_are_the_plain_loops(model_of, parser_of):
    request = parser_of("dmd")(**FEW_STEPS)
    ours = generate(model_of("dmd"), request)
    assert difference(ours, few_step_reference(FEW_STEPS)) <= TOLERANCE
    assert request.num_inference_steps == 3
    for mistake in ({"shift": 1.0}, {"timesteps": (1000, 667, 333)}, {"fresh": False}):
        assert difference(ours, few_step_reference(FEW_STEPS, **mistake)) > FAR


def test_the_noise_of_few_steps_belongs_to_the_request(model_of, parser_of):
    """Given others that come and go and draw noise of their own, when they run together, none shows it."""
    values = [{**FEW_STEPS, "seed": seed, "prompt": f"cat {seed}"} for seed in range(4)]
    arrivals = [(when, parser_of("dmd")(**fields)) for when, fields in zip((0, 0, 1, 2), values, strict=True)]
    videos, sizes = generate_together(model_of("dmd"), arrivals, dropped_after={1: 1})
    assert max(sizes) == 3 and sorted(videos) == [0, 2, 3]
    for i, video in videos.items():
        assert difference(video, few_step_reference(values[i])) <= TOLERANCE
    assert difference(videos[0], videos[2]) > FAR


@pytest.mark.parametrize("field", ["guidance_scale", "negative_prompt", "flow_shift", "sample_solver"])
def test_few_steps_have_no_field_for_what_is_distilled_away(parser_of, field):
    with pytest.raises(RequestError, match=f"unknown parameter '{field}'"):
        parser_of("dmd")(prompt="a cat", **{field: 2.0})
    with pytest.raises(RequestError, match="num_inference_steps=4"):
        parser_of("dmd")(prompt="a cat", num_inference_steps=4)


@pytest.mark.parametrize(("boundary", "unused"), [(0.0, "transformer_2"), (1.0, "transformer")])
def test_a_boundary_that_needs_one_expert_loads_one(model_of, parser_of, two_experts, tmp_path, boundary, unused):
    from omni_plugin_wan22.checkpoints import build_pipeline

    folder = shutil.copytree(two_experts, tmp_path / "copy")
    shutil.rmtree(folder / unused)
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "boundary_ratio": boundary, unused: [None, None]}))

    model, parse = model_of.__wrapped__(folder), parser_of.__wrapped__(folder)

    assert len(model.experts) == 1 and parse(**BASE).expert_boundary is None
    expected = reference_video(build_pipeline(), {**BASE, "boundary_ratio": boundary})
    assert difference(generate(model, parse(**BASE)), expected) <= TOLERANCE
    with pytest.raises(RequestError, match="unknown parameter 'boundary_ratio'"):
        parse(**BASE, boundary_ratio=0.5)
