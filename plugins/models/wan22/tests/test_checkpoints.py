"""The builders of random checkpoints, from the command line."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from wan22_support import TI2V, generate, picture, sdpa


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Run the command with the given options; the folder that it wrote."""
    from omni_plugin_wan22 import checkpoints

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["checkpoints", str(tmp_path / "out"), *options])
        checkpoints.main()
        return tmp_path / "out"

    return run


@pytest.mark.parametrize(
    ("options", "name", "folders"),
    [
        ((), "WanPipeline", 2),
        (("--experts", "1"), "WanPipeline", 1),
        (("--kind", "i2v-a14b", "--euler"), "WanImageToVideoPipeline", 2),
        (("--kind", "dmd"), "WanDMDPipeline", 1),
    ],
)
def test_a_tiny_checkpoint_is_of_the_kind(build, options, name, folders):
    folder = build(*options)
    assert json.loads((folder / "model_index.json").read_text())["_class_name"] == name
    assert len(list(folder.glob("transformer*"))) == folders


@pytest.mark.parametrize(
    "options",
    [
        ("--kind", "s2v"),
        ("--kind", "dmd", "--experts", "1"),
        ("--device", "cuda"),
        ("--text-encoder", "tiny"),
        ("--real", "--euler"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(build, options):
    with pytest.raises(SystemExit):
        build(*options)


def test_a_checkpoint_of_genuine_size_can_be_served(parallel, build, monkeypatch):
    """With the sizes cut down, for the test: names, shapes, dtypes and shards are the real ones' as they are."""
    from omni_core.checkpoint import Checkpoint
    from omni_core.diffusion.contract import StageContext
    from omni_core.requests import parse_request
    from omni_plugin_wan22 import real_size
    from omni_plugin_wan22.model import WanModel
    from omni_plugin_wan22.request import request

    monkeypatch.setitem(real_size.TRANSFORMERS, "ti2v-5b", {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 64})
    small = {**real_size.VAE_5B, "base_dim": 4, "decoder_base_dim": 4, "num_res_blocks": 1}
    monkeypatch.setattr(real_size, "VAE_5B", small)

    folder = build("--kind", "ti2v-5b", "--real", "--text-encoder", "tiny", "--shard-size", "2MB")

    shards = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 3e6 for shard in shards)
    with safe_open(shards[0], "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118
    model = WanModel.load(StageContext(folder, torch.device("cpu"), torch.bfloat16, sdpa))
    fields = {**TI2V, "num_inference_steps": 2, "image": picture(1)}
    video = generate(model, parse_request(request(Checkpoint(folder)), fields))
    assert video.shape == (9, 64, 96, 3) and np.isfinite(video).all() and video.std() > 0.01


def test_genuine_sizes_have_the_known_numbers_of_parameters():
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    from omni_plugin_wan22.real_size import TRANSFORMERS, VAE_5B

    def billions(module):
        return sum(p.numel() for p in module.parameters()) / 1e9

    with torch.device("meta"):
        assert billions(WanTransformer3DModel(**TRANSFORMERS["ti2v-5b"], in_channels=48)) == pytest.approx(
            5.0, abs=0.05
        )
        assert billions(WanTransformer3DModel(**TRANSFORMERS["t2v-a14b"])) == pytest.approx(14.3, abs=0.05)
        assert billions(WanTransformer3DModel(**TRANSFORMERS["t2v-2.1"])) == pytest.approx(1.42, abs=0.05)
        assert billions(AutoencoderKLWan(**VAE_5B)) == pytest.approx(0.7, abs=0.05)


def test_a_size_is_a_number_with_a_unit():
    from omni_plugin_wan22.real_size import _bytes

    assert [_bytes(text) for text in ("7B", "50KB", "500MB", "2gb")] == [7, 50_000, 500_000_000, 2_000_000_000]
    with pytest.raises(ValueError, match="2GB or 500MB"):
        _bytes("much")
