"""Code2Wav's Triton kernels against the reference: on a GPU, and elsewhere in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from code2wav_support import codes_of, network_of, reference, whole_of, worst

from omni_plugin_qwen3_omni.code2wav import Code2Wav

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.gpu
with_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
with_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = {
    "upsample_rates": (2, 3), "upsampling_ratios": (2,), "num_hidden_layers": 1, "hidden_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "decoder_dim": 64, "sliding_window": 3,
}  # fmt: skip
"""12 samples for a frame, 9 of them cut from the first."""
SAMPLES, FEWER = 12, 9
GENUINE = {
    "codebook_size": 2048, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
    "sliding_window": 72, "intermediate_size": 3072, "num_hidden_layers": 8, "decoder_dim": 1536,
}  # fmt: skip


@pytest.fixture(autouse=True)
def true_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


def decoder_of(network, dtype=torch.float32, sessions=3, *, buckets=(1, 2), chunks=(1, 2), graphs=False):
    """The stage in slots that were used before, by sessions that left something in them."""
    from omni_speech_codec.fused_network import FusedNetwork
    from omni_speech_codec.step_graphs import GraphSettings, SlotDecoder

    fused = FusedNetwork(network, dtype, sessions + 1)
    fused.pool.packed.fill_(0.7)
    return Code2Wav(None, SlotDecoder(fused, GraphSettings(buckets, chunks), graphs=graphs), sessions)


def push(decoder, states, chunks):
    return [output["audio"] for output in decoder.step(states, [{"codes": chunk} for chunk in chunks])]


@with_kernels
def test_chunks_are_the_reference_s_whole():
    model = reference(**SMALL)
    decoder, codes = decoder_of(network_of(model, device=DEVICE)), codes_of(6)
    state = decoder.open({})
    audio = np.concatenate([push(decoder, [state], [chunk])[0] for chunk in np.split(codes, [1, 3])])
    assert worst(audio, whole_of(model, codes)) < 1e-5


@with_kernels
def test_a_session_that_begins_beside_another():
    """Given one session ahead, beyond the window, then both hear what they hear alone, the new one 9 samples fewer."""
    model = reference(**SMALL)
    decoder, codes = decoder_of(network_of(model, device=DEVICE)), [codes_of(6, 1), codes_of(2, 2)]
    whole = [whole_of(model, frames) for frames in codes]
    states = [decoder.open({}), decoder.open({})]
    push(decoder, states[:1], [codes[0][:4]])
    found = push(decoder, states, [codes[0][4:], codes[1]])
    assert worst(found[0], whole[0][4 * SAMPLES - FEWER :]) < 1e-5 and worst(found[1], whole[1]) < 1e-5


@with_kernels
def test_float16_is_near_and_a_wrong_code_is_not():
    model = reference(**SMALL)
    decoder, codes = decoder_of(network_of(model, device=DEVICE), torch.float16), codes_of(3)
    whole = whole_of(model, codes)
    assert 1e-6 < worst(push(decoder, [decoder.open({})], [codes])[0], whole) < 5e-3
    codes[1, 3] = (codes[1, 3] + 1) % 32
    assert worst(push(decoder, [decoder.open({})], [codes])[0], whole) > 1e-2


@with_cuda
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.float16, 5e-3)], ids=str)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_genuine_size(dtype, most, graphs):
    """Given sessions that join at different times, then all hear what the reference gives in true float32."""
    model = reference(**GENUINE)
    network, codes = network_of(model, device=DEVICE), [codes_of(45, seed, size=2048) for seed in range(3)]
    model.to(DEVICE)
    frames = [torch.from_numpy(each.astype(np.int64)).T[None].to(DEVICE) for each in codes]
    whole = [model(each)[0, 0].cpu().numpy() for each in frames]
    decoder = decoder_of(network, dtype, buckets=(1, 2, 4), chunks=(1, 2, 4, 8, 16), graphs=graphs)
    states, parts = [decoder.open({}) for _ in codes], [[] for _ in codes]
    for rows, chunk in [([0], 1), ([0, 1, 2], 16), ([1, 2], 25), ([0], 28), ([1, 2], 4)]:
        at = [states[row].position for row in rows]
        found = push(
            decoder, [states[row] for row in rows], [codes[row][a : a + chunk] for row, a in zip(rows, at, strict=True)]
        )
        for row, audio in zip(rows, found, strict=True):
            parts[row].append(audio)
    differences = [worst(np.concatenate(part), sound) for part, sound in zip(parts, whole, strict=True)]
    assert max(differences) < most, differences


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
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout
