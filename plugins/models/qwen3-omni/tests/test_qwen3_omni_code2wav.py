"""Code2Wav: the reference's samples, in any chunks, beside any sessions, from the checkpoint's own tensors alone."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json

import numpy as np
import pytest
import torch
from code2wav_support import codes_of, load, network_of, push, reference, stream, whole_of, worst, write_checkpoint
from safetensors.torch import load_file, save_file

from omni_core.errors import CheckpointError
from omni_core.module.client import ModuleEngine
from omni_core.module.process import ModuleSettings
from omni_plugin_qwen3_omni.code2wav import Code2Wav, empty_network
from omni_speech_codec.streaming_layers import SlidingAttention

SAMPLES, FEWER = 1920, 555
ROUNDING = 1e-5
"""Of float32, in samples up to 1: kernels for other lengths add in another order."""
CHUNKS = {
    "1": [1] * 40, "2": [2] * 20, "7": [7] * 6, "25": [25] * 2, "growing": [1, 2, 4, 8, 16, 32],
    "mixed": [3, 1, 30, 2, 2, 11],
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model():
    return reference()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen3-omni"), model)


@pytest.fixture(scope="module")
def decoder(folder):
    return load(folder)


@pytest.fixture(scope="module")
def exact_decoder(folder):
    """In float64, where rounding hides nothing."""
    return load(folder, torch.float64)


@pytest.fixture(scope="module")
def whole(model):
    """The reference's sound of 40 frames."""
    return whole_of(model, codes_of(40))


class TestParity:
    def test_the_reference_s_sound_is_one(self, whole):
        assert len(whole) == 40 * SAMPLES - FEWER and whole.std() > 0.05 and np.abs(whole).max() < 1

    @pytest.mark.parametrize("chunks", CHUNKS)
    def test_chunks_joined_are_the_reference_s_whole(self, decoder, whole, chunks):
        audio = stream(decoder, codes_of(40), CHUNKS[chunks])
        assert audio.dtype == np.float32 and worst(audio, whole) < ROUNDING

    def test_more_exactly_in_float64(self, model, exact_decoder):
        """The reference's norms are float32 there too."""
        exact = whole_of(copy.deepcopy(model).double(), codes_of(40))
        assert worst(stream(exact_decoder, codes_of(40), CHUNKS["mixed"]), exact) < 2e-6

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_key_value_heads": 4, "attention_bias": True},
            {"upsample_rates": (2, 3), "upsampling_ratios": (2,)},
            {"upsample_rates": (3,), "upsampling_ratios": ()},
            {"num_quantizers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        ],
    )
    def test_other_shapes(self, tmp_path, changes):
        """Of the third, all that a first frame becomes is cut."""
        model = reference(**changes)
        codes = codes_of(20, groups=model.config.num_quantizers)
        assert worst(stream(load(write_checkpoint(tmp_path, model)), codes, [1, 4, 2, 13]), whole_of(model, codes)) < (
            ROUNDING
        )

    @pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.1), (torch.float16, 0.015)])
    def test_samples_in_16_bits_are_near(self, folder, whole, dtype, most):
        assert ROUNDING < worst(stream(load(folder, dtype), codes_of(40), [4] * 10), whole) < most

    @pytest.mark.parametrize("layer", [0, -1])
    def test_a_dropped_layer_shows(self, folder, whole, layer):
        decoder = load(folder)
        del decoder.network.pre_transformer.layers[layer]
        assert worst(stream(decoder, codes_of(40), [40]), whole) > 1e-2

    def test_another_codebook_shows(self, folder, whole):
        """Given two groups whose codebooks are swapped, then the sound is another."""
        decoder = load(folder)
        table = decoder.network.dequantizer.entries.unflatten(0, (16, -1))
        table[[3, 4]] = table[[4, 3]]
        assert worst(stream(decoder, codes_of(40), [40]), whole) > 1e-2

    @pytest.mark.parametrize("group", [0, 7, 15])
    def test_one_wrong_code_shows_from_its_frame_on(self, decoder, whole, group):
        codes = codes_of(40)
        codes[10, group] = (codes[10, group] + 1) % 32
        audio, begin = stream(decoder, codes, [40]), 10 * SAMPLES - FEWER
        assert worst(audio[:begin], whole[:begin]) < ROUNDING
        assert worst(audio[begin : begin + SAMPLES], whole[begin : begin + SAMPLES]) > 1e-2

    def test_the_past_counts(self, decoder, whole):
        """Given chunks that forget what was before, then they are not the whole: the reference's own chunks forget."""
        audio = np.concatenate([stream(decoder, chunk, [10]) for chunk in np.split(codes_of(40), 4)])
        assert worst(audio[10 * SAMPLES - FEWER :][:SAMPLES], whole[10 * SAMPLES - FEWER :][:SAMPLES]) > 1e-2

    def test_what_is_cut_from_the_begin_is_no_mere_delay(self, model, whole):
        """Given layers that take it into account, then the begin of the sound is another one."""
        network = network_of(model)
        for layer in network.modules():
            if hasattr(layer, "skipped") and layer is not network:
                layer.skipped = 0
        codes = torch.from_numpy(codes_of(40).astype(np.int64))[None]
        audio = network(codes, torch.zeros(1, network.layout.size), torch.zeros(1, dtype=torch.int64))[0, FEWER:]
        assert worst(audio[:100], whole[:100]) > 1e-3 and worst(audio[-SAMPLES:], whole[-SAMPLES:]) < ROUNDING


class TestSessions:
    def test_at_different_positions_they_share_a_step(self, decoder, exact_decoder):
        """Given sessions at 0, 3 and 23 frames, then each hears what it hears alone, the new one 555 samples fewer."""
        codes, positions = [codes_of(40, seed) for seed in range(3)], (0, 3, 23)
        for which, tolerance in ((decoder, ROUNDING), (exact_decoder, 1e-7)):
            alone = [stream(which, frames, [40]) for frames in codes]
            states = [which.open({}) for _ in codes]
            for state, frames, position in zip(states, codes, positions, strict=True):
                if position:
                    push(which, [state], [frames[:position]])
            for turn in range(3):
                begins = [position + 4 * turn for position in positions]
                together = push(which, states, [c[b : b + 4] for c, b in zip(codes, begins, strict=True)])
                for audio, sound, begin in zip(together, alone, begins, strict=True):
                    first = max(0, begin * SAMPLES - FEWER)
                    assert worst(audio, sound[first : (begin + 4) * SAMPLES - FEWER]) < tolerance

    @pytest.mark.parametrize("frames", [1, 9, 30])
    def test_silent_frames_leave_the_state_that_rendered_ones_leave(self, exact_decoder, frames):
        codes = codes_of(frames + 14)
        states = [exact_decoder.open({}), exact_decoder.open({})]
        push(exact_decoder, states[:1], [codes[:frames]])
        assert push(exact_decoder, states[1:], [codes[:frames]], silent=True) == [None]
        assert (states[0].packed - states[1].packed).abs().max() < 1e-12
        assert worst(*push(exact_decoder, states, [codes[frames:]] * 2)) < 1e-7

    def test_a_state_has_the_same_size_however_long_a_session_is(self, decoder):
        state = decoder.open({})
        packed, size = state.packed, state.packed.untyped_storage().nbytes()
        for turn in range(10):
            push(decoder, [state], [codes_of(8, turn)])
        assert state.position == 80 and state.packed is packed
        assert packed.untyped_storage().nbytes() == size == 4 * decoder.network.layout.size

    def test_its_genuine_size_is_known(self):
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

        network = empty_network(Qwen3OmniMoeCode2WavConfig())
        attention = sum(np.prod(m.past_shape) for m in network.modules() if isinstance(m, SlidingAttention))
        assert attention == 8 * 2 * 16 * 71 * 64
        assert (network.samples_per_frame, network.skipped) == (SAMPLES, FEWER)

    @pytest.mark.parametrize(
        ("codes", "message"),
        [
            (np.zeros((3, 15), np.int32), r"expected integers \[frames, 16\]"),
            (np.full((1, 16), 32), "from 32 to 32; expected 0 to 31"),
        ],
    )
    def test_codes_that_are_none_are_refused(self, decoder, codes, message):
        with pytest.raises(ValueError, match=message):
            decoder.batch_key(decoder.open({}), {"codes": codes})


class TestCheckpoints:
    @pytest.fixture
    def copied(self, model, tmp_path):
        """A checkpoint to spoil."""
        return write_checkpoint(tmp_path / "copy", model)

    def spoil(self, folder, change):
        file = folder / "model-00002-of-00002.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        index = folder / "model.safetensors.index.json"
        files = json.loads(index.read_text())["weight_map"]
        others = {name: shard for name, shard in files.items() if shard != file.name}
        index.write_text(json.dumps({"weight_map": others | dict.fromkeys(tensors, file.name)}))

    def test_a_missing_tensor(self, copied):
        self.spoil(copied, lambda tensors: tensors.pop("code2wav.code_embedding.weight"))
        with pytest.raises(
            CheckpointError, match=r"code2wav do not fit.* 1 missing \(code2wav.code_embedding.weight\)"
        ):
            load(copied)

    def test_an_unexpected_tensor(self, copied):
        self.spoil(copied, lambda tensors: tensors.update({"code2wav.more": torch.zeros(1)}))
        with pytest.raises(CheckpointError, match=r"1 unexpected \(code2wav.more\)"):
            load(copied)

    def test_a_tensor_of_another_shape(self, copied):
        self.spoil(copied, lambda tensors: tensors.update({"code2wav.decoder.5.beta": torch.zeros(3)}))
        with pytest.raises(CheckpointError, match=r"code2wav.decoder.5.beta has shape \[3\].*asks for \[4\]"):
            load(copied)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model_type": "qwen3_tts"}, "model_type is 'qwen3_tts', expected 'qwen3_omni_moe'"),
            ({"enable_audio_output": False}, "does not speak"),
            ({"code2wav_config": 3}, "not a usable configuration of Code2Wav"),
        ],
    )
    def test_another_configuration(self, copied, change, message):
        self.configure(copied, lambda config: config.update(change))
        with pytest.raises(CheckpointError, match=message):
            load(copied)

    def test_an_unknown_activation(self, copied):
        self.configure(copied, lambda config: config["code2wav_config"].update(hidden_act="relu"))
        with pytest.raises(CheckpointError, match="Code2Wav has hidden_act 'relu'; only 'silu'"):
            load(copied)

    def configure(self, folder, change):
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.serve
def test_sessions_through_the_stage_s_process(folder, model):
    """Given two requests with chunks of their own, then each hears what the reference says."""
    codes, chunks = [codes_of(24, 1), codes_of(24, 2)], [[4] * 6, [1, 2, 4, 8, 9]]
    path = f"{Code2Wav.__module__}:{Code2Wav.__name__}"
    engine = ModuleEngine(ModuleSettings("code2wav", path, str(folder), "cpu", "float32"))

    async def one(frames, sizes):
        session = engine.open()
        ends = list(itertools.accumulate(sizes))
        pushed = [
            await session.push({"codes": frames[end - size : end]}) for size, end in zip(sizes, ends, strict=True)
        ]
        session.close()
        return np.concatenate([output["audio"] for output in pushed])

    async def run():
        return await asyncio.gather(*map(one, codes, chunks))

    try:
        heard = asyncio.run(run())
    finally:
        engine.close()
    for audio, frames in zip(heard, codes, strict=True):
        assert worst(audio, whole_of(model, frames)) < ROUNDING
