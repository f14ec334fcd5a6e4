"""Configurations load through ``AutoConfig``, from the files of a checkpoint alone."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import AutoConfig, MimiConfig

from omni_plugin_qwen3_tts.checkpoints import KINDS, SIZES, model_config, speech_tokenizer_config
from omni_plugin_qwen3_tts.config import (
    Qwen3TTSConfig,
    Qwen3TTSSpeakerEncoderConfig,
    Qwen3TTSTokenizer12HzConfig,
    register,
)


@pytest.fixture
def load(tmp_path):
    """What a ``config.json`` says to what ``AutoConfig`` makes of it."""
    register()

    def run(content):
        (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return AutoConfig.from_pretrained(tmp_path)

    return run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_s_configuration_loads(load, kind, size):
    said = model_config(kind, size)
    config = load(said)
    assert type(config) is Qwen3TTSConfig and config.tts_model_type == said["tts_model_type"]
    talker, predictor = config.talker_config, config.talker_config.code_predictor_config
    for part, values in ((talker, said["talker_config"]), (predictor, said["talker_config"]["code_predictor_config"])):
        left_out = {"rope_theta", "rope_scaling", "code_predictor_config"}
        assert {name: getattr(part, name) for name in values.keys() - left_out} == {
            name: values[name] for name in values.keys() - left_out
        }
        assert part.rope_parameters["rope_theta"] == 1000000
    assert talker.rope_parameters["mrope_section"] == said["talker_config"]["rope_scaling"]["mrope_section"]
    assert sum(talker.rope_parameters["mrope_section"]) == talker.head_dim // 2
    assert config.get_text_config() is talker


def test_a_speech_tokenizer_s_configuration_loads(load):
    config = load(speech_tokenizer_config("1.7b"))
    assert type(config) is Qwen3TTSTokenizer12HzConfig
    assert type(config.encoder_config) is MimiConfig and config.encoder_config.frame_rate == 12.5
    assert config.decoder_config.samples_per_frame == config.decode_upsample_rate == 1920
    assert config.decoder_config.rope_parameters["rope_theta"] == 10000
    assert config.output_sample_rate / config.decode_upsample_rate == 12.5


def test_a_base_checkpoint_says_of_its_speaker_encoder_only_what_differs(load):
    encoder = load(model_config("base", "1.7b")).speaker_encoder_config
    assert type(encoder) is Qwen3TTSSpeakerEncoderConfig
    assert (encoder.enc_dim, encoder.mel_dim, encoder.enc_channels) == (2048, 128, [512, 512, 512, 512, 1536])


def test_only_custom_voices_have_speakers_and_dialects(load):
    custom, design = (load(model_config(kind, "1.7b")).talker_config for kind in ("custom-voice", "voice-design"))
    assert len(custom.spk_id) == 9 and not design.spk_id
    assert custom.spk_is_dialect["eric"] == "sichuan_dialect" and custom.spk_is_dialect["ryan"] is False
    assert custom.codec_language_id.keys() - design.codec_language_id.keys() == {"beijing_dialect", "sichuan_dialect"}


def test_a_configuration_survives_being_saved(load, tmp_path):
    config = load(model_config("base"))
    config.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert {**again.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


def test_what_a_configuration_is_made_from_stays_as_it_is():
    said = model_config("base")
    before = copy.deepcopy(said)
    Qwen3TTSConfig(**said)
    assert said == before


def test_lists_of_a_speaker_encoder_are_as_long_as_each_other():
    with pytest.raises(ValueError, match=r"one entry per block.* 5, 3 and 5"):
        Qwen3TTSSpeakerEncoderConfig(enc_kernel_sizes=[5, 3, 1])
