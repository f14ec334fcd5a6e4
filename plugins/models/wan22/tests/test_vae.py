"""The VAE's own computation against diffusers' ``AutoencoderKLWan``, frame for frame."""

from __future__ import annotations

import functools

import pytest
import torch
from wan22_support import sdpa

from omni_core.errors import ConfigError

TOLERANCE = 2e-6
"""Float32 on CPU, of the largest value. Measured: 1.4e-6 at most; diffusers' float32 is that far from its float64."""
TOLERANCE_DEEP = 1e-5
"""The same for VAEs with more layers and few channels, which amplify rounding. Measured: 4e-6 at most."""
FRAMES = (1, 5, 9, 17)
GROWING = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "latents_mean": [0.1] * 4}
PATCHED = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
VARIANTS = {
    "a14b": "t2v-a14b",
    "5b": "ti2v-5b",
    "a14b, wider with depth": {**GROWING, "latents_std": [0.5] * 4},
    "5b, wider with depth": {**GROWING, **PATCHED, "decoder_base_dim": 8, "latents_std": [0.5] * 4},
    "5b, wider with depth, doubled twice": {
        **GROWING, **PATCHED, "latents_std": [2.0] * 4, "temperal_downsample": [True, True, False]
    },
    "5b, narrower with depth": {**GROWING, **PATCHED, "dim_mult": [4, 2, 1, 1], "latents_std": [0.5] * 4},
}  # fmt: skip


@functools.cache
def reference(variant):
    """diffusers' VAE with random weights."""
    from diffusers import AutoencoderKLWan

    from omni_plugin_wan22.checkpoints import _randomise, build_pipeline

    if isinstance(VARIANTS[variant], str):
        return build_pipeline(kind=VARIANTS[variant]).vae
    vae = AutoencoderKLWan(**VARIANTS[variant]).eval().requires_grad_(False)
    _randomise(vae, torch.Generator().manual_seed(0))
    return vae


@pytest.fixture(scope="module")
def ours(parallel, tmp_path_factory):
    """A variant, and a dtype, to the VAE as the model loads it."""
    from omni_plugin_wan22.vae import load_vae

    @functools.cache
    def load(variant, dtype=torch.float32):
        folder = tmp_path_factory.mktemp("vae")
        reference(variant).save_pretrained(folder)
        return load_vae(reference(variant).config, folder, torch.device("cpu"), dtype)

    return load


def latents(vae, frames, seed=0):
    shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, 3, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def video(vae, frames, seed=0):
    scale = vae.config.scale_factor_spatial
    noise = torch.rand(1, 3, frames, 3 * scale, 2 * scale, generator=torch.Generator().manual_seed(seed))
    return 2 * noise - 1


def statistics(vae):
    return (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))


@torch.inference_mode()
def decoded_by_diffusers(vae, normalised):
    mean, std = statistics(vae)
    decoded = vae.decode(normalised * std + mean, return_dict=False)[0]
    return decoded[0].permute(1, 2, 3, 0) * 0.5 + 0.5


@torch.inference_mode()
def encoded_by_diffusers(vae, pixels):
    mean, std = statistics(vae)
    return (vae.encode(pixels).latent_dist.mode() - mean) / std


@torch.inference_mode()
def decoded(vae, normalised):
    from omni_plugin_wan22.vae import decode

    return list(decode(vae, normalised))


def tolerance(variant):
    return TOLERANCE if isinstance(VARIANTS[variant], str) else TOLERANCE_DEEP


def error(found, expected):
    """The largest difference, of the largest value."""
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.float32
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decodes_as_diffusers_does(ours, variant, frames):
    normalised = latents(reference(variant), frames)
    chunks = decoded(ours(variant), normalised)
    assert [len(chunk) for chunk in chunks] == [1] + [4] * (frames // 4)
    expected = decoded_by_diffusers(reference(variant), normalised)
    assert expected.std() > 0.01
    assert error(torch.cat(chunks), expected) <= tolerance(variant)


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_encodes_as_diffusers_does(ours, variant, frames):
    from omni_plugin_wan22.vae import encode, encode_chunks

    pixels = video(reference(variant), frames)
    with torch.inference_mode():
        found, chunks = encode(ours(variant), pixels), list(encode_chunks(ours(variant), pixels))
    assert error(found, encoded_by_diffusers(reference(variant), pixels)) <= tolerance(variant)
    assert [chunk.shape[2] for chunk in chunks] == [1] * found.shape[2] and torch.equal(torch.cat(chunks, dim=2), found)


@pytest.mark.parametrize("variant", ["a14b", "5b"])
def test_decodes_by_turns_are_as_they_are_alone(ours, variant):
    from omni_plugin_wan22.vae import decode

    videos = [latents(reference(variant), 9, seed) for seed in (1, 2)]
    alone = [decoded(ours(variant), normalised) for normalised in videos]
    with torch.inference_mode():
        turns = zip(*(decode(ours(variant), normalised) for normalised in videos), strict=True)
        for chunk, found in enumerate(turns):
            assert all(torch.equal(mine, alone[i][chunk]) for i, mine in enumerate(found))


@pytest.mark.parametrize("variant", ["a14b", "5b"])
def test_a_forgotten_past_is_far_off(ours, variant, monkeypatch):
    """Given one convolution that never remembers, when a video is decoded, then all but its first frame differ."""
    from omni_plugin_wan22 import vae_layers

    vae = ours(variant)
    forgetful = vae.decoder.mid_block.resnets[0].conv2
    remember = vae_layers.causal_conv

    def forget(conv, buffer, past):
        found = remember(conv, buffer, past)
        if conv is forgetful:
            del past.frames[conv]
        return found

    normalised = latents(vae, 9)
    expected = decoded_by_diffusers(reference(variant), normalised)
    monkeypatch.setattr(vae_layers, "causal_conv", forget)
    first, *others = decoded(vae, normalised)
    assert error(first, expected[:1]) <= TOLERANCE and error(torch.cat(others), expected[1:]) > 100 * TOLERANCE


def test_zeros_stay_zeros(ours):
    from omni_plugin_wan22 import vae_layers

    norm = reference("a14b").decoder.norm_out
    x = torch.zeros(1, 1, 2, 2, norm.gamma.numel())
    x[:, :, 0] = 1e-6
    expected = norm(x.permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)
    found = vae_layers.rms_norm(norm, x)
    assert not found[:, :, 1].any() and torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_16_bits_are_near(ours, dtype, allowed):
    from omni_plugin_wan22.vae import encode

    vae, normalised, pixels = ours("5b", dtype), latents(reference("5b"), 9), video(reference("5b"), 5)
    assert {p.dtype for p in vae.parameters()} == {dtype}
    found = torch.cat(decoded(vae, normalised))
    with torch.inference_mode():
        encoded = encode(vae, pixels)
    assert 0 < error(found, decoded_by_diffusers(reference("5b"), normalised)) < allowed
    assert 0 < error(encoded, encoded_by_diffusers(reference("5b"), pixels)) < 3 * allowed


def test_vae_dtype_is_an_option_of_the_stage(parallel, checkpoint_of):
    """Given ``vae_dtype``, when the model is loaded, then the VAE has it and nothing else does."""
    from omni_core.checkpoint import Checkpoint
    from omni_core.diffusion.contract import StageContext
    from omni_plugin_wan22.family import pipeline
    from omni_plugin_wan22.model import WanModel

    folder = checkpoint_of("t2v-2.1")
    options = pipeline(Checkpoint(folder)).stage.options
    for name, dtype in ((options["vae_dtype"], torch.float32), ("float16", torch.float16)):
        context = StageContext(folder, torch.device("cpu"), torch.float32, sdpa, {**options, "vae_dtype": name})
        model = WanModel.load(context)
        assert model.vae.dtype == dtype and model.experts[0].dtype == torch.float32


def test_an_unknown_vae_dtype_is_refused_before_anything_is_read(tmp_path):
    from omni_core.diffusion.contract import StageContext
    from omni_plugin_wan22.model import WanModel

    context = StageContext(tmp_path, torch.device("cpu"), torch.float32, sdpa, {"vae_dtype": "float8"})
    with pytest.raises(ConfigError, match=r"vae_dtype is 'float8'; .*float32, bfloat16, float16"):
        WanModel.load(context)
