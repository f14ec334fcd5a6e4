"""Which checkpoints the family takes, and what it says of those that it cannot serve."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError, UnsupportedCheckpoint
from omni_plugin_wan22 import plugin
from omni_plugin_wan22.family import pipeline, read_layout


@pytest.fixture
def folder(two_experts, tmp_path):
    return shutil.copytree(two_experts, tmp_path / "checkpoint")


def edit(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_declared_family_claims_the_checkpoint(folder):
    (family,) = plugin.omni_model_families()
    for name in ("WanPipeline", "WanImageToVideoPipeline", "WanDMDPipeline"):
        edit(folder / "model_index.json", _class_name=name)
        assert family.matches.specificity(Checkpoint(folder)) == 1
    edit(folder / "model_index.json", _class_name="WanVACEPipeline")
    assert family.matches.specificity(Checkpoint(folder)) is None


def test_declaring_imports_nothing_heavy():
    code = (
        "import sys, omni_plugin_wan22.plugin, omni_plugin_wan22.family;"
        "print([m for m in ('torch', 'vllm', 'transformers', 'diffusers', 'pydantic') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_two_experts_are_read(folder):
    layout = read_layout(Checkpoint(folder))
    assert layout.experts == ("transformer", "transformer_2") and layout.boundary_ratio == 0.875
    assert (layout.temporal_scale, layout.spatial_scale, layout.patch_size) == (4, 8, (1, 2, 2))
    assert pipeline(Checkpoint(folder)).stage.name == "diffusion"


@pytest.mark.parametrize(
    ("kind", "conditioning", "image_required", "few_steps"),
    [
        ("t2v-2.1", "text", False, False),
        ("ti2v-5b", "first-frame", False, False),
        ("i2v-a14b", "channels", True, False),
        ("dmd", "text", False, True),
    ],
)
def test_what_a_network_takes_is_read(checkpoint_of, kind, conditioning, image_required, few_steps):
    layout = read_layout(Checkpoint(checkpoint_of(kind)))
    assert (layout.conditioning, layout.image_required, layout.few_steps) == (conditioning, image_required, few_steps)


def test_the_image_pipeline_of_per_token_timesteps_needs_an_image(checkpoint_of, tmp_path):
    folder = shutil.copytree(checkpoint_of("ti2v-5b"), tmp_path / "copy")
    edit(folder / "model_index.json", _class_name="WanImageToVideoPipeline")
    layout = read_layout(Checkpoint(folder))
    assert layout.conditioning == "first-frame" and layout.image_required


def test_few_steps_with_per_token_timesteps_take_text(checkpoint_of, tmp_path):
    folder = shutil.copytree(checkpoint_of("ti2v-5b"), tmp_path / "copy")
    edit(folder / "model_index.json", _class_name="WanDMDPipeline")
    layout = read_layout(Checkpoint(folder))
    assert layout.conditioning == "text" and layout.few_steps


def test_without_a_boundary_there_is_one_expert(folder):
    """As in ``WanPipeline``, which never calls ``transformer_2`` where ``boundary_ratio`` is null."""
    edit(folder / "model_index.json", boundary_ratio=None)
    assert read_layout(Checkpoint(folder)).experts == ("transformer",)


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        ("transformer/config.json", {"in_channels": 36}, "takes 36 channels and the VAE gives 16"),
        ("transformer/config.json", {"image_dim": 1280}, "CLIP image encoder .image_dim is set"),
        ("model_index.json", {"_class_name": "WanImageToVideoPipeline"}, "takes 16 channels; noise, mask.*have 36"),
        ("model_index.json", {"_class_name": "WanDMDPipeline"}, "distilled to few steps and has two experts"),
        ("transformer_2/config.json", {"num_layers": 2}, "differ in num_layers"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "scheduler is DDIMScheduler"),
        ("scheduler/scheduler_config.json", {"use_flow_sigmas": False}, "does not use flow sigmas"),
        ("scheduler/scheduler_config.json", {"prediction_type": "epsilon"}, "flow prediction"),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "sets use_karras_sigmas"),
        (
            "scheduler/scheduler_config.json",
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True},
            "sets use_dynamic_shifting",
        ),
    ],
)
def test_what_is_not_served_yet_says_why(folder, file, values, reason):
    edit(folder / file, **values)
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        pipeline(Checkpoint(folder))


@pytest.mark.parametrize(
    "file",
    [
        "transformer/config.json",
        "transformer_2/config.json",
        "vae/config.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_missing_component_is_named(folder, file):
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"has no {file}"):
        pipeline(Checkpoint(folder))
