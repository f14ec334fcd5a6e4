"""The transformer alone against diffusers' WanTransformer3DModel, in float32 and bfloat16, and its parts."""

from __future__ import annotations

import copy

import pytest
import torch
from wan22_support import sdpa

SHAPES = [(1, 16, 1, 4, 4), (2, 16, 3, 4, 6), (3, 16, 5, 2, 16)]


@pytest.fixture(scope="module")
def reference(parallel):
    from omni_plugin_wan22.checkpoints import build_pipeline

    return build_pipeline().transformer


@pytest.fixture(scope="module")
def load(parallel, two_experts):
    from omni_core.checkpoint import Checkpoint
    from omni_core.vllm.loading import load_weights
    from omni_plugin_wan22.transformer import TransformerConfig, WanTransformer, checkpoint_name

    def load(dtype):
        config = TransformerConfig.from_json(Checkpoint(two_experts).read("transformer/config.json"))
        transformer = WanTransformer(config, dtype, sdpa)
        load_weights(transformer, two_experts / "transformer", checkpoint_name)
        return transformer

    return load


def inputs(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(shape, generator=generator)
    timestep = torch.tensor([[999.0], [500.0], [3.0]])[: shape[0]]
    return latents, timestep, torch.randn(shape[0], 11, 32, generator=generator)


def run_reference(module, latents, timestep, text):
    with torch.inference_mode():
        timestep = timestep.flatten()
        return module(hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_equals_the_reference(load, reference, shape):
    latents, timestep, text = inputs(shape)
    with torch.inference_mode():
        ours = load(torch.float32)(latents, timestep, text)
    expected = run_reference(reference, latents, timestep, text)
    assert (ours - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_timesteps_per_frame_equal_the_references_per_token(load, reference):
    latents, _, text = inputs(SHAPES[1])
    per_frame = torch.tensor([[0.0, 700.0, 700.0], [999.0, 999.0, 999.0]])
    per_token = per_frame.repeat_interleave(2 * 3, dim=1)
    transformer = load(torch.float32)
    with torch.inference_mode():
        ours = transformer(latents, per_frame, text)
        second = transformer(latents[1:], torch.tensor([[999.0]]), text[1:])
        expected = reference(latents, per_token, text, return_dict=False)[0]
    assert (ours - expected).abs().max() <= 5e-6 * expected.abs().max()
    assert (ours[1:] - second).abs().max() <= 5e-6 * expected.abs().max()
    assert (ours[:1] - run_reference(reference, latents, torch.tensor([[700.0], [999.0]]), text)[:1]).abs().max() > 0.01


def test_bfloat16_is_as_near_to_float32_as_the_reference_is(load, reference):
    """The islands of float32 (time embedding, modulation, norms) are the reference's, so the error is of its size."""
    latents, timestep, text = inputs(SHAPES[1])
    exact = run_reference(reference, latents, timestep, text)
    low = tuple(x.bfloat16() for x in (latents, text))
    rounded = copy.deepcopy(reference)
    for name, parameter in rounded.named_parameters():
        if not any(kept in name for kept in rounded._keep_in_fp32_modules):
            parameter.data = parameter.data.bfloat16()
    expected = run_reference(rounded, low[0], timestep, low[1]).float()
    with torch.inference_mode():
        ours = load(torch.bfloat16)(low[0], timestep, low[1]).float()

    def error(x):
        return (x - exact).square().mean().sqrt().item()

    assert 0 < error(ours) <= 1.25 * error(expected)
    assert error(ours) <= 0.02 * exact.square().mean().sqrt().item()


def test_islands_of_float32_stay_float32(load):
    kept = {name for name, p in load(torch.bfloat16).named_parameters() if p.dtype == torch.float32}
    assert kept == {
        name
        for name, _ in load(torch.float32).named_parameters()
        if any(part in name for part in ("time_embedder", "scale_shift_table", "norm2"))
    }


def test_a_video_does_not_depend_on_the_others_in_its_batch(load):
    latents, timestep, text = inputs(SHAPES[2])
    transformer = load(torch.float32)
    with torch.inference_mode():
        together = transformer(latents, timestep, text)
        alone = torch.cat([transformer(latents[i : i + 1], timestep[i : i + 1], text[i : i + 1]) for i in range(3)])
    assert (together - alone).abs().max() <= 5e-6 * alone.abs().max()


def test_rotary_tables_are_the_references(reference):
    from omni_plugin_wan22.transformer import RotaryEmbedding

    cos, sin = RotaryEmbedding(12).tables((3, 2, 4), torch.device("cpu"))
    expected_cos, expected_sin = reference.rope(torch.empty(1, 16, 3, 4, 8))
    assert torch.equal(cos, expected_cos[0, :, :, ::2]) and torch.equal(sin, expected_sin[0, :, :, 1::2])


def test_rotary_tables_are_kept_for_few_grids():
    from omni_plugin_wan22.transformer import RotaryEmbedding

    rope, device = RotaryEmbedding(12), torch.device("cpu")
    first = rope.tables((1, 1, 1), device)
    assert rope.tables((1, 1, 1), device) is first
    for columns in range(2, 10):
        rope.tables((1, 1, columns), device)
    assert len(rope._tables) == RotaryEmbedding.KEPT
    assert rope.tables((1, 1, 1), device) is not first


@pytest.mark.parametrize("change", [{"heads": 3}, {"ffn": 49}], ids=str)
def test_an_indivisible_tensor_parallel_size_is_refused(monkeypatch, change):
    from omni_core.errors import ConfigError
    from omni_plugin_wan22 import transformer

    monkeypatch.setattr(transformer, "get_tensor_model_parallel_world_size", lambda: 2)
    config = transformer.TransformerConfig(
        num_attention_heads=change.get("heads", 2), attention_head_dim=12, ffn_dim=change.get("ffn", 48), num_layers=1
    )
    with pytest.raises(ConfigError, match="tensor parallel size of 2 does not divide"):
        transformer.WanTransformer(config, torch.float32, sdpa)
