"""The decoder's Triton kernels against the network in PyTorch: on a GPU, and elsewhere in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from omni_plugin_qwen3_tts.checkpoints import random_tensors, speech_tokenizer_config
from omni_plugin_qwen3_tts.codec_decoder import CodecDecoder, build_network
from omni_plugin_qwen3_tts.config import Qwen3TTSTokenizer12HzConfig
from omni_plugin_qwen3_tts.layout import speech_tokenizer_tensors
from omni_speech_codec import codec_products

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.gpu
with_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
with_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = {
    "upsample_rates": [2, 3], "upsampling_ratios": [2], "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "decoder_dim": 64, "latent_dim": 32,
}  # fmt: skip
"""12 samples for a frame, residual units of 32 and 16 channels."""
GENUINE = {"size": "1.7b"}


@pytest.fixture(autouse=True)
def true_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


def build(size="tiny", **changes):
    """A network in float32 with random weights, and a config that differs from that of ``size``."""
    values = speech_tokenizer_config(size)
    values["decoder_config"].update(changes)
    config = Qwen3TTSTokenizer12HzConfig(**values)
    named = ((name, shape) for name, shape in speech_tokenizer_tensors(config) if name.startswith("decoder."))
    tensors = random_tensors(named, torch.Generator(DEVICE).manual_seed(0))
    stored = {name.removeprefix("decoder."): tensor for name, tensor in tensors}
    return build_network(config.decoder_config, stored, DEVICE, torch.float32)


def codes_of(network, batch, frames, seed=1):
    return np.random.default_rng(seed).integers(0, network.codebook_size, (batch, frames, network.groups), np.int32)


def expected(network, codes):
    """The whole at once, in PyTorch."""
    packed = torch.zeros(len(codes), network.layout.size, device=DEVICE)
    begin = torch.zeros(len(codes), dtype=torch.int64, device=DEVICE)
    return network(torch.from_numpy(codes.astype(np.int64)).to(DEVICE), packed, begin).cpu().numpy()


def decoder_of(network, dtype=torch.float32, slots=4, *, buckets=(1, 2, 4), chunks=(1, 2, 4), graphs=False, **more):
    """Steps in slots that were used before, by sessions that left something in them."""
    from omni_speech_codec.fused_network import FusedNetwork
    from omni_speech_codec.step_graphs import GraphSettings, SlotDecoder

    fused = FusedNetwork(network, dtype, slots, **more)
    fused.pool.packed.fill_(0.7)
    return SlotDecoder(fused, GraphSettings(buckets, chunks), graphs=graphs)


def worst(a, b):
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def in_chunks(decoder, codes, chunks, slots):
    parts, begin = [], 0
    for chunk in chunks:
        parts.append(decoder(codes[:, begin : begin + chunk], slots, [begin] * len(codes)))
        begin += chunk
    assert begin == codes.shape[1]
    return np.concatenate(parts, axis=1)


@with_kernels
@pytest.mark.parametrize("widest_unit", [128, 16], ids=["fused units", "units as two products"])
def test_chunks_are_the_whole_in_pytorch(widest_unit):
    """Given two sessions in slots that were used before, then any chunks are what PyTorch gives for all at once."""
    network = build(**SMALL)
    codes = codes_of(network, 2, 6)
    found = in_chunks(decoder_of(network, widest_unit=widest_unit), codes, [1, 2, 3], [3, 1])
    assert worst(found, expected(network, codes)) < 1e-5


@with_kernels
@pytest.mark.parametrize("widest_unit", [128, 192])
def test_large_tiles_and_rows_beyond_them(monkeypatch, widest_unit):
    """Given tiles for many rows, of 192 columns too, where there are few, then the samples are the same."""
    monkeypatch.setattr(codec_products, "WAVE", 0)
    network = build(**{**SMALL, "decoder_dim": 384})
    codes = codes_of(network, 1, 2)
    found = in_chunks(decoder_of(network, widest_unit=widest_unit), codes, [2], [1])
    assert worst(found, expected(network, codes)) < 1e-5


@with_kernels
def test_float16_is_near():
    network = build(**SMALL)
    codes = codes_of(network, 1, 4)
    found = in_chunks(decoder_of(network, torch.float16), codes, [2, 2], [2])
    assert 1e-6 < worst(found, expected(network, codes)) < 2e-3


@with_kernels
def test_sessions_at_different_positions_share_a_step():
    """Given one session ahead of another, beyond the window of attention, then each hears what it hears alone."""
    network = build(**SMALL, sliding_window=3)
    codes, decoder = codes_of(network, 2, 6), decoder_of(network)
    whole = expected(network, codes)
    assert decoder(codes[:1, :4], [2], [0], silent=True) is None
    found = decoder(np.stack((codes[0, 4:], codes[1, :2])), [2, 1], [4, 0])
    assert worst(found[0], whole[0, 48:]) < 1e-5 and worst(found[1], whole[1, :24]) < 1e-5


@with_kernels
def test_a_batch_that_fills_no_bucket_and_one_beyond_the_largest():
    network = build(**SMALL)
    codes, decoder = codes_of(network, 3, 1), decoder_of(network, buckets=(1, 2))
    assert worst(decoder(codes, [3, 1, 2], [0, 0, 0]), expected(network, codes)) < 1e-5


@with_kernels
def test_a_closed_session_s_slot_is_another_s():
    """Given room for one session, when it is closed, then the next one begins anew in its place."""
    network = build(**SMALL)
    codes = codes_of(network, 2, 1)
    decoder = CodecDecoder(None, decoder_of(network, slots=2), max_sessions=1)
    first = decoder.open({})
    decoder.step([first], [{"codes": codes[0]}])
    with pytest.raises(RuntimeError, match="no room for another session; raise its option max_sessions"):
        decoder.open({})
    decoder.close(first)
    second = decoder.open({})
    decoder.close(first)  # again, which is nobody's slot
    assert second.slot == 1 and first.slot is None
    (output,) = decoder.step([second], [{"codes": codes[1]}])
    assert output["audio"].dtype == np.float32 and worst(output["audio"], expected(network, codes[1:])[0]) < 1e-5


@with_cuda
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 5e-2)], ids=str
)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_genuine_size(dtype, most, graphs):
    """Given sessions that join and leave, then all hear what PyTorch gives in true float32."""
    network = build(**GENUINE)
    codes = codes_of(network, 5, 90)
    whole = expected(network, codes).reshape(5, 90, -1)
    decoder = decoder_of(network, dtype, 6, buckets=(1, 2, 4, 8), chunks=(1, 2, 4, 8, 16), graphs=graphs)
    at, differences = [0] * 5, []
    for rows, chunk in [([0], 1), ([0, 1, 2, 3, 4], 16), ([1, 4, 0], 25), ([3], 40), ([0, 2, 3, 4], 2), ([1], 16)]:
        inputs = np.stack([codes[row, at[row] : at[row] + chunk] for row in rows])
        found = decoder(inputs, [row + 1 for row in rows], [at[row] for row in rows])
        for row, audio in zip(rows, found, strict=True):
            differences.append(worst(audio.reshape(chunk, -1), whole[row, at[row] : at[row] + chunk]))
            at[row] += chunk
    assert max(differences) < most, differences


@with_cuda
def test_a_large_batch_of_the_genuine_size():
    """Given 64 sessions and 16 frames, whose tiles are the large ones, then each hears the same as alone."""
    network = build(**GENUINE)
    codes = codes_of(network, 64, 16)
    decoder = decoder_of(network, torch.float16, 65, buckets=(1, 64), chunks=(1, 16))
    together = decoder(codes, list(range(1, 65)), [0] * 64)
    alone = np.concatenate([decoder(codes[row : row + 1], [1], [0]) for row in range(64)])
    assert worst(together, alone) < 5e-3
    assert worst(together[:4], expected(network, codes[:4])) < 5e-3


@with_cuda
def test_a_step_beside_work_on_another_stream():
    """Given a long kernel on the current stream, then a step neither waits for it nor stops it."""
    network = build(**SMALL)
    codes, decoder = codes_of(network, 1, 2), decoder_of(network, buckets=(1,), chunks=(1, 2), graphs=True)
    decoder(codes, [1], [0])  # the first step takes memory for the host, which waits for the device
    done = torch.cuda.Event()
    torch.cuda._sleep(int(2e9))
    done.record()
    found = decoder(codes, [1], [0])
    assert not done.query()
    torch.cuda.synchronize()
    assert worst(found, expected(network, codes)) < 1e-5


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
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout
