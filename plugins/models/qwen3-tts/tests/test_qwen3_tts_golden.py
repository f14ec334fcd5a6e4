"""The golden files are worth comparing with: nothing in them is degenerate, and they show what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
REQUESTS = [name for name in CASES if name not in ("speech_tokenizer", "speaker_encoder")]


def test_they_are_small():
    assert len(REQUESTS) == 10 and sum(file.stat().st_size for file in GOLDEN.iterdir()) < 2e6


@pytest.mark.parametrize("name", REQUESTS)
def test_codes_vary_over_time_in_every_group(golden_tensors, name):
    codes = golden_tensors(name)["codes"]
    assert codes.shape[1] == 16 and codes.min() >= 0 and codes.max() < 256
    assert all(len(group.unique()) > len(group) / 2 for group in codes.T)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_talker_may_say_a_code_or_after_two_steps_that_it_ends(golden_tensors, checkpoint_of, name):
    scores, eos = golden_tensors(name)["scores"], 2150 - 2048 + 256
    allowed = torch.isfinite(scores)
    assert allowed[:, :256].all() and not allowed[:, 257:eos].any() and not allowed[:, eos + 1 :].any()
    assert allowed[:, eos].tolist() == [step >= 2 for step in range(len(scores))]


def test_one_request_ends_by_itself(golden_tensors):
    lengths = {name: len(golden_tensors(name)["codes"]) for name in REQUESTS}
    assert sorted(set(lengths.values()))[-1] == 24 and min(lengths.values()) < 24


def test_audio_is_neither_silent_nor_clipped(golden_tensors):
    for name in ("custom_voice", "base_in_context", "speech_tokenizer"):
        tensors = golden_tensors(name)
        audio = tensors.get("audio", tensors.get("decoder.audio"))
        assert audio.shape == (24 * 1920,) and audio.std() > 0.05 and (audio.abs() == 1).float().mean() < 1e-3


def test_chunks_differ_from_the_whole_where_context_is_missing(golden_tensors):
    tensors = golden_tensors("speech_tokenizer")
    difference = (tensors["decoder.audio"] - tensors["decoder.audio_chunked"]).abs()
    assert difference[: 10 * 1920].max() < 1e-5 < 1e-3 < difference[10 * 1920 :].max()
