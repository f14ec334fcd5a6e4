"""The reference encoder: the reference's codes, mel spectrogram and embedding of a voice, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_core.errors import CheckpointError
from omni_core.module.client import ModuleEngine
from omni_core.module.contract import ModuleContext
from omni_core.module.process import ModuleSettings
from omni_plugin_qwen3_tts import reference_encoder
from omni_plugin_qwen3_tts.config import Qwen3TTSSpeakerEncoderConfig
from omni_plugin_qwen3_tts.reference_encoder import ReferenceEncoder
from omni_plugin_qwen3_tts.speaker_encoder import shortest_audio


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def encoder(checkpoint_of):
    return load(checkpoint_of("base"))


@pytest.fixture(scope="module")
def audio(golden_tensors):
    return golden_tensors("speech_tokenizer")["encoder.audio"].numpy().astype(np.float32) / 32768


def load(folder, dtype=torch.float32):
    return ReferenceEncoder.load(ModuleContext(folder, torch.device("cpu"), dtype))


def encode(encoder, audio, **options):
    state, values = encoder.open(options), {"audio": audio}
    encoder.batch_key(state, values)
    (outputs,) = encoder.step([state], [values])
    return outputs


class TestParity:
    def test_codes_are_the_reference_s(self, encoder, audio, golden_tensors):
        codes = encode(encoder, audio)["codes"]
        assert codes.dtype == np.int32 and codes.shape == (21, 16)
        assert np.array_equal(codes, golden_tensors("speech_tokenizer")["encoder.codes"].numpy())

    def test_so_are_those_of_audio_beyond_the_configured_window(self, encoder, audio, golden_tensors):
        codes = encode(encoder, np.tile(audio, 7), embedding=False)["codes"]
        assert np.array_equal(codes, golden_tensors("speech_tokenizer")["encoder.codes_of_long"].numpy())

    def test_with_the_configured_window_they_are_not(self, checkpoint_of, audio, golden_tensors, monkeypatch):
        monkeypatch.setattr(reference_encoder, "EVERYTHING", 250)
        codes = encode(load(checkpoint_of("base")), np.tile(audio, 7), embedding=False)["codes"]
        assert not np.array_equal(codes, golden_tensors("speech_tokenizer")["encoder.codes_of_long"].numpy())

    def test_mel_and_embedding_are_the_reference_s(self, encoder, audio, golden_tensors):
        tensors = golden_tensors("speaker_encoder")
        mel = encoder.mel(torch.from_numpy(audio))
        assert mel.shape == (151, 128) and (mel - tensors["mel"]).abs().max() < 1e-5
        embedding = encode(encoder, audio)["embedding"]
        assert embedding.dtype == np.float32 and embedding.shape == (64,)
        assert np.abs(embedding - tensors["embedding"].numpy()).max() < 1e-5

    @pytest.mark.parametrize("size", ["tiny", "tiny-0.6b"])
    def test_what_the_talker_was_given_is_that(self, checkpoint_of, audio, golden_tensors, size):
        encoder = load(checkpoint_of("base", size))
        tensors = golden_tensors("base_x_vector" if size == "tiny" else "base_same_width")
        assert np.abs(encode(encoder, audio)["embedding"] - tensors["speaker_embedding"].numpy()).max() < 1e-5

    def test_in_context_codes_too(self, encoder, audio, golden_tensors):
        assert np.array_equal(encode(encoder, audio)["codes"], golden_tensors("base_in_context")["ref_codes"].numpy())

    def test_a_dropped_block_shows(self, checkpoint_of, audio, golden_tensors):
        encoder = load(checkpoint_of("base"))
        encoder.speaker.blocks[2].se_block = torch.nn.Identity()
        embedding = encode(encoder, audio, codes=False)["embedding"]
        assert np.abs(embedding - golden_tensors("speaker_encoder")["embedding"].numpy()).max() > 1e-2

    def test_codes_are_float32_s_in_a_stage_of_bfloat16(self, checkpoint_of, audio, golden_tensors):
        outputs = encode(load(checkpoint_of("base"), torch.bfloat16), audio)
        assert np.array_equal(outputs["codes"], golden_tensors("speech_tokenizer")["encoder.codes"].numpy())
        expected = golden_tensors("speaker_encoder")["embedding"].numpy()
        error = np.abs(outputs["embedding"] - expected).max() / np.abs(expected).max()
        assert 1e-4 < error < 5e-2


class TestWhatIsWanted:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, {"codes", "embedding"}),
            ({"codes": False}, {"embedding"}),
            ({"embedding": False}, {"codes"}),
        ],
    )
    def test_is_what_comes(self, encoder, audio, options, expected):
        assert encode(encoder, audio, **options).keys() == expected

    @pytest.mark.parametrize("samples", [1, 1919, 1920, 1921])
    def test_a_frame_counts_that_is_filled_in_part(self, encoder, audio, samples):
        assert encode(encoder, audio[:samples], embedding=False)["codes"].shape == (-(-samples // 1920), 16)

    def test_each_session_is_alone(self, encoder, audio):
        states = [encoder.open({}), encoder.open({})]
        first, second = (encoder.batch_key(state, {"audio": audio}) for state in states)
        assert first != second

    def test_the_shortest_audio_has_an_embedding_and_a_shorter_one_none(self, encoder, audio):
        shortest = shortest_audio(Qwen3TTSSpeakerEncoderConfig())
        assert shortest == encoder.shortest == 1280
        assert np.isfinite(encode(encoder, audio[:shortest])["embedding"]).all()
        with pytest.raises(RuntimeError, match=r"[Pp]adding"):
            encoder.step([encoder.open({})], [{"audio": audio[: shortest - 1]}])


class TestRefusals:
    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            (np.zeros(1279, np.float32), "1279 samples; at least 1280"),
            (np.zeros((1, 2000), np.float32), r"float32 \[1, 2000\]; expected float32 \[samples\]"),
            (np.zeros(2000, np.int16), "int16"),
            (np.full(2000, np.nan, np.float32), "not finite"),
        ],
    )
    def test_audio_that_is_none(self, encoder, samples, message):
        with pytest.raises(ValueError, match=message):
            encoder.batch_key(encoder.open({}), {"audio": samples})

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"codes": False, "embedding": False}, "nothing is wanted"), ({"mel": True}, "unknown options mel")],
    )
    def test_options(self, encoder, options, message):
        with pytest.raises(ValueError, match=message):
            encoder.open(options)

    def test_a_checkpoint_of_another_kind(self, checkpoint_of):
        with pytest.raises(CheckpointError, match="'custom_voice'; only 'base'"):
            load(checkpoint_of("custom-voice"))

    @pytest.mark.parametrize(
        ("file", "name"),
        [
            ("model.safetensors", "speaker_encoder.fc.bias"),
            ("speech_tokenizer/model.safetensors", "encoder.downsample.conv.weight"),
        ],
    )
    def test_a_missing_tensor(self, checkpoint_of, tmp_path, file, name):
        folder = shutil.copytree(checkpoint_of("base"), tmp_path / "copy")
        tensors = load_file(folder / file)
        del tensors[name]
        save_file(tensors, folder / file)
        with pytest.raises(CheckpointError, match=f"1 missing \\({name}\\)"):
            load(folder)

    def test_another_rate(self, checkpoint_of, tmp_path):
        folder = shutil.copytree(checkpoint_of("base"), tmp_path / "copy")
        config = json.loads((folder / "config.json").read_text())
        config["speaker_encoder_config"]["sample_rate"] = 16000
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="its speaker encoder hears 16000 Hz"):
            load(folder)


@pytest.mark.serve
def test_through_the_stage_s_process(checkpoint_of, audio, golden_tensors):
    """Given two sessions, one with audio that is none, then the other one gets its codes."""
    settings = ModuleSettings(
        "reference",
        "omni_plugin_qwen3_tts.reference_encoder:ReferenceEncoder",
        str(checkpoint_of("base")),
        "cpu",
        "float32",
    )
    engine = ModuleEngine(settings)

    async def run():
        good, bad = engine.open({"embedding": False}), engine.open()
        return await asyncio.gather(good.push({"audio": audio}), bad.push({"audio": audio[:5]}), return_exceptions=True)

    try:
        outputs, error = asyncio.run(run())
    finally:
        engine.close()
    assert np.array_equal(outputs["codes"], golden_tensors("speech_tokenizer")["encoder.codes"].numpy())
    assert "5 samples; at least 1280" in str(error)
