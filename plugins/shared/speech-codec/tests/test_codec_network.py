"""A decoder's network in the shapes that families have: chunks in PyTorch, and the kernels, which stay in bounds."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from codec_support import GROUPS, SHAPES, SIZE, STRAIGHT, random_network

from omni_speech_codec.codec_weights import network_weights, stored_tensors
from omni_speech_codec.streaming_layers import CausalConv, CausalTransposedConv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
with_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def codes_of(batch, frames, seed=1):
    return np.random.default_rng(seed).integers(0, SIZE, (batch, frames, GROUPS), np.int32)


def sound(network, codes, chunks):
    """In PyTorch, raw: with what is to be skipped."""
    device, dtype = network.pre_transformer.norm.weight.device, network.pre_transformer.norm.weight.dtype
    packed = torch.zeros(len(codes), network.layout.size, device=device, dtype=dtype)
    frames, begin, parts = torch.from_numpy(codes.astype(np.int64)).to(device), 0, []
    for size in chunks:
        parts.append(network(frames[:, begin : begin + size], packed, torch.full((len(codes),), begin, device=device)))
        begin += size
    assert begin == codes.shape[1]
    return torch.cat(parts, dim=1).cpu().numpy()[:, network.skipped :]


def worst(a, b):
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


@each_shape
@pytest.mark.parametrize("chunks", [[1] * 9, [2, 3, 4], [1, 8]], ids=str)
def test_chunks_joined_are_the_whole(shape, chunks):
    network, codes = random_network(shape, dtype=torch.float64), codes_of(2, 9)
    whole = sound(network, codes, [9])
    assert 0.01 < np.abs(whole).max() < 1
    assert worst(sound(network, codes, chunks), whole) < 1e-12


@each_shape
def test_every_parameter_is_made_of_what_checkpoints_store(shape):
    network = random_network(shape)
    stored = {name: torch.zeros(size) for name, size in stored_tensors(network)}
    made = {name: tensor.shape for name, tensor in network_weights(stored)}
    assert made == {
        name: tensor.shape for name, tensor in network.state_dict().items() if name != "dequantizer.entries"
    }


def test_layers_skip_what_the_ones_before_cut():
    """Given rates 2 and 3 behind one of 2, then each block adds its own rate to what was cut, times it."""
    network = random_network(STRAIGHT)
    convs = [m for m in network.decoder.modules() if isinstance(m, CausalConv | CausalTransposedConv)]
    assert {(layer.rate, layer.skipped) for layer in convs} == {(2, 0), (4, 2), (12, 9)}
    assert network.skipped == 9 and network.samples_per_frame == 12


def decoder_of(network, slots=4, *, buckets=(1, 2), chunks=(1, 2), **more):
    """Steps in slots that were used before, by sessions that left something in them."""
    from omni_speech_codec.fused_network import FusedNetwork
    from omni_speech_codec.step_graphs import GraphSettings, SlotDecoder

    fused = FusedNetwork(network, torch.float32, slots, **more)
    fused.pool.packed.fill_(0.7)
    return SlotDecoder(fused, GraphSettings(buckets, chunks), graphs=False)


def bounds():
    """Reads and writes are only checked where they are interpreted."""
    from omni_core.testing.triton_bounds import within_bounds

    return within_bounds() if INTERPRETED else nullcontext()


@with_kernels
@each_shape
@pytest.mark.parametrize("widest_unit", [128, 16], ids=["fused units", "units as two products"])
def test_kernels_compute_it_within_bounds(shape, widest_unit):
    """Given two sessions in slots that were used before, one of them the last, then any chunks are the whole."""
    network, codes = random_network(shape, DEVICE), codes_of(2, 5)
    decoder, begin, parts = decoder_of(network, widest_unit=widest_unit), 0, []
    with bounds():
        for chunk in (1, 3, 1):
            parts.append(decoder(codes[:, begin : begin + chunk], [3, 1], [begin] * 2))
            begin += chunk
    assert worst(np.concatenate(parts, axis=1)[:, network.skipped :], sound(network, codes, [5])) < 1e-5


@with_kernels
@each_shape
def test_large_tiles_do(monkeypatch, shape):
    """Given tiles for many rows where there are few, then nothing beyond them is touched."""
    from omni_speech_codec import codec_products

    monkeypatch.setattr(codec_products, "WAVE", 0)
    network, codes = random_network(shape, DEVICE), codes_of(1, 2)
    with bounds():
        found = decoder_of(network)(codes, [3], [0])
    assert worst(found[:, network.skipped :], sound(network, codes, [2])) < 1e-5


@with_kernels
def test_sessions_at_different_positions_share_a_step():
    """Given one session at its begin and one ahead, then only the first skips."""
    network, codes = random_network(STRAIGHT, DEVICE), codes_of(2, 4)
    decoder, whole = decoder_of(network), sound(network, codes, [4])
    assert decoder(codes[:1, :2], [2], [0], silent=True) is None
    found = decoder(np.stack((codes[0, 2:], codes[1, :2])), [2, 1], [2, 0])
    skipped = network.skipped
    assert (
        worst(found[0], whole[0, 24 - skipped :]) < 1e-5 and worst(found[1, skipped:], whole[1, : 24 - skipped]) < 1e-5
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_a_slot_that_is_not_there_is_out_of_bounds():
    decoder = decoder_of(random_network(STRAIGHT, DEVICE))
    with bounds(), pytest.raises(Exception, match="beyond all arguments"):
        decoder(codes_of(1, 1), [4], [0])


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process")
def test_the_kernels_pass_in_tritons_interpreter():
    """In a process of its own, since Triton looks for ``TRITON_INTERPRET`` when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0 and "17 passed" in done.stdout, done.stdout
