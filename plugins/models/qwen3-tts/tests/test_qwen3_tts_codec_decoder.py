"""The speech tokenizer's decoder: the reference's samples, in any chunks, beside any sessions, in bounded memory."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_core.errors import CheckpointError, ConfigError
from omni_core.module.client import ModuleEngine
from omni_core.module.contract import ModuleContext
from omni_core.module.messages import Changed, Close, Open, Push, Sleep, WakeUp
from omni_core.module.process import ModuleRunner, ModuleSettings
from omni_core.plugins.declarations import load_reference
from omni_plugin_qwen3_tts.codec_decoder import CodecDecoder
from omni_speech_codec.streaming_layers import PastLayout, SlidingAttention

SAMPLES = 1920
WINDOW = 8  # of the tiny checkpoints
ROUNDING = 1e-5
"""Of float32, in samples up to 1: kernels for other lengths add in another order. The reference's own prefixes of the
golden codes differ from its whole by 2e-6, and its whole from float64 as much."""
CHUNKS = {
    "1": [1] * 300, "2": [2] * 150, "7": [7] * 50, "25": [25] * 12, "adaptive": [1, 2, 4, 8, 16, 32, *[25] * 12],
    "mixed": [3, 1, 30, 2, 2, 11, *[9] * 40],
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def decoder(checkpoint_of):
    return load(checkpoint_of("base"))


@pytest.fixture(scope="module")
def exact_decoder(checkpoint_of):
    """In float64, where rounding hides nothing."""
    return load(checkpoint_of("base"), torch.float64)


def load(folder, dtype=torch.float32, **options):
    return CodecDecoder.load(ModuleContext(folder, torch.device("cpu"), dtype, options))


def random_codes(frames, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, 16), dtype=np.int32)


def stream(decoder, codes, chunks):
    """All of ``codes`` in chunks of the given sizes, through the module's own entry, in the network's dtype."""
    state, parts, begin = decoder.open({}), [], 0
    for size in chunks:
        if begin == len(codes):
            break
        parts.append(push(decoder, [state], [codes[begin : begin + size]])[0])
        begin = min(begin + size, len(codes))
    assert begin == len(codes) == state.position
    return np.concatenate(parts)


def push(decoder, states, codes, **more):
    inputs = [{"codes": chunk, **more} for chunk in codes]
    (key,) = {decoder.batch_key(state, values) for state, values in zip(states, inputs, strict=True)}
    assert key[0] == len(codes[0])
    return [output.get("audio") for output in decoder.step(states, inputs)]


def worst(a, b):
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


class TestParity:
    def test_samples_are_the_reference_s(self, decoder, golden_tensors):
        tensors = golden_tensors("speech_tokenizer")
        audio = stream(decoder, tensors["decoder.codes"].numpy(), [24])
        assert audio.dtype == np.float32 and worst(audio, tensors["decoder.audio"]) < ROUNDING

    def test_so_is_what_lies_between(self, decoder, golden_tensors):
        tensors = golden_tensors("speech_tokenizer")
        network = decoder.network
        stages = {
            "quantized": network.dequantizer, "pre_conv": network.pre_conv, "pre_transformer": network.pre_transformer,
            "upsample_0": network.upsample[0][1], "upsample_1": network.upsample[1][1],
            "decoder_0": network.decoder[0], "decoder_1": network.decoder[1],
        }  # fmt: skip
        seen = {}
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, output, name=name: seen.update({name: output[0]}))
            for name, module in stages.items()
        ]
        stream(decoder, tensors["decoder.codes"].numpy(), [24])
        for hook in hooks:
            hook.remove()
        seen["pre_transformer"] = seen["pre_transformer"].T
        seen["decoder_1"] = seen["decoder_1"][:, :96]
        for name, ours in seen.items():
            theirs = tensors[f"decoder.{name}"]
            assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-6 * theirs.abs().max(), name

    @pytest.mark.parametrize(("case", "kind"), [("custom_voice", "custom-voice"), ("base_in_context", "base")])
    def test_so_is_speech_after_a_silent_reference(self, checkpoint_of, golden_tensors, case, kind):
        tensors, decoder = golden_tensors(case), load(checkpoint_of(kind))
        state = decoder.open({})
        if "ref_codes" in tensors:
            assert push(decoder, [state], [tensors["ref_codes"].numpy()], silent=True) == [None]
        audio = [push(decoder, [state], [chunk.numpy()])[0] for chunk in tensors["codes"].split(5)]
        assert worst(np.concatenate(audio), tensors["audio"]) < ROUNDING

    @pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.1), (torch.float16, 0.015)])
    def test_samples_in_16_bits_are_near(self, checkpoint_of, golden_tensors, dtype, most):
        tensors = golden_tensors("speech_tokenizer")
        audio = stream(load(checkpoint_of("base"), dtype), tensors["decoder.codes"].numpy(), [4] * 6)
        assert audio.dtype == np.float32 and ROUNDING < worst(audio, tensors["decoder.audio"]) < most

    def test_the_codec_s_dtype_goes_before_the_stage_s(self, checkpoint_of):
        assert load(checkpoint_of("base"), codec_dtype="auto").dtype == torch.float32
        assert load(checkpoint_of("base"), codec_dtype="bfloat16").dtype == torch.bfloat16

    @pytest.mark.parametrize("layer", ["first", "last"])
    def test_a_dropped_layer_shows(self, checkpoint_of, golden_tensors, layer):
        tensors = golden_tensors("speech_tokenizer")
        decoder = load(checkpoint_of("base"))
        layers = decoder.network.pre_transformer.layers
        del layers[0 if layer == "first" else -1]
        assert worst(stream(decoder, tensors["decoder.codes"].numpy(), [24]), tensors["decoder.audio"]) > 1e-2

    @pytest.mark.parametrize("group", [0, 1, 15])
    def test_one_wrong_code_shows_from_its_frame_on(self, decoder, golden_tensors, group):
        tensors = golden_tensors("speech_tokenizer")
        codes = tensors["decoder.codes"].clone()
        codes[10, group] = (codes[10, group] + 1) % 256
        audio, whole = stream(decoder, codes.numpy(), [24]), tensors["decoder.audio"].numpy()
        assert worst(audio[: 10 * SAMPLES], whole[: 10 * SAMPLES]) < ROUNDING
        assert worst(audio[10 * SAMPLES : 11 * SAMPLES], whole[10 * SAMPLES : 11 * SAMPLES]) > 1e-2


class TestStreaming:
    @pytest.mark.parametrize("chunks", CHUNKS)
    def test_chunks_joined_are_the_whole(self, decoder, exact_decoder, chunks):
        codes = random_codes(61)
        for which, tolerance in ((decoder, ROUNDING), (exact_decoder, 1e-6)):
            whole = stream(which, codes, [61])
            assert worst(stream(which, codes, CHUNKS[chunks]), whole) < tolerance
        # beyond float32 of the output too
        assert worst(raw(exact_decoder, codes, CHUNKS[chunks]), raw(exact_decoder, codes, [61])) < 1e-12

    def test_the_past_counts(self, decoder):
        codes = random_codes(30)
        whole = stream(decoder, codes, [30])
        forgotten = [stream(decoder, chunk, [10]) for chunk in np.split(codes, 3)]
        assert worst(np.concatenate(forgotten), whole) > 1e-2

    def test_every_layer_s_past_counts(self, exact_decoder):
        """Given a state of which one layer's part is lost, then the next chunk is another one."""
        network = exact_decoder.network
        codes = random_codes(20)
        state = exact_decoder.open({})
        push(exact_decoder, [state], [codes[:12]])
        right = push(exact_decoder, [copy.deepcopy(state)], [codes[12:]])[0]
        looking_back = [m for m in network.modules() if hasattr(m, "past_shape") and np.prod(m.past_shape)]
        assert len(looking_back) == 1 + 3 + 2 + 1 + 4 * 4 + 1
        for layer in looking_back:
            damaged = copy.deepcopy(state)
            network.layout.view(layer, damaged.packed[None]).zero_()
            assert worst(push(exact_decoder, [damaged], [codes[12:]])[0], right) > 1e-5, layer

    def test_attention_looks_back_a_window_and_no_further(self, exact_decoder):
        """Given codes that differ in frame 0, then a layer of attention tells until frame 7."""
        seen = []
        attention = exact_decoder.network.pre_transformer.layers[0].self_attn
        hook = attention.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
        for codes in (a := random_codes(20), np.concatenate((random_codes(1, seed=1), a[1:]))):
            codes = codes.copy()
            codes[0] = 0 if codes is a else codes[0]
            stream(exact_decoder, codes, [20])
        hook.remove()
        differs = [bool((x - y).abs().max() > 1e-9) for x, y in zip(*seen, strict=True)]
        # two frames more than the window, through the convolution before
        assert differs == [True] * (WINDOW + 2) + [False] * (20 - WINDOW - 2)

    @pytest.mark.parametrize("frames", [1, 9, 10, 11, 40])
    def test_silent_frames_leave_the_state_that_rendered_ones_leave(self, exact_decoder, frames):
        codes = random_codes(frames + 14)
        states = [exact_decoder.open({}), exact_decoder.open({})]
        push(exact_decoder, states[:1], [codes[:frames]])
        assert push(exact_decoder, states[1:], [codes[:frames]], silent=True) == [None]
        assert states[0].position == states[1].position == frames
        assert (states[0].packed - states[1].packed).abs().max() < 1e-12
        rendered, silent = push(exact_decoder, states, [codes[frames:]] * 2)
        assert worst(rendered, silent) < 1e-7

    def test_a_chunk_costs_itself_and_not_its_context(self, decoder):
        """Given a long past, then a chunk convolves positions of its own and of no more than its kernels' reach."""
        lengths = []
        hooks = [
            conv.register_forward_hook(lambda _m, _i, output: lengths.append(output.shape[-1]))
            for conv in decoder.network.modules()
            if isinstance(conv, torch.nn.Conv1d)
        ]
        state = decoder.open({})
        push(decoder, [state], [random_codes(50)])
        lengths.clear()
        push(decoder, [state], [random_codes(1)])
        for hook in hooks:
            hook.remove()
        assert set(lengths) == {1, 2, 4, 32, 160, 640, 1920}


def raw(decoder, codes, chunks):
    """Like ``stream``, in the network's own dtype."""
    packed = torch.zeros(1, decoder.network.layout.size, dtype=decoder.dtype)
    frames, begin, parts = torch.from_numpy(codes.astype(np.int64)), 0, []
    for size in chunks:
        if begin >= len(frames):
            break
        parts.append(decoder.network(frames[None, begin : begin + size], packed, torch.tensor([begin])))
        begin += size
    return torch.cat(parts, dim=1)[0].numpy()


class TestBatches:
    def test_sessions_at_different_positions_share_a_step(self, decoder, exact_decoder):
        codes = [random_codes(40, seed) for seed in range(3)]
        positions = (0, 3, 23)
        for which, tolerance in ((decoder, ROUNDING), (exact_decoder, 1e-7)):
            alone = [
                stream(which, c, [p, 4, 4, 4, 100] if p else [4, 4, 4, 100])
                for c, p in zip(codes, positions, strict=True)
            ]
            states = [which.open({}) for _ in codes]
            for state, c, p in zip(states, codes, positions, strict=True):
                if p:
                    push(which, [state], [c[:p]])
            for turn in range(3):
                begins = [p + 4 * turn for p in positions]
                together = push(which, states, [c[b : b + 4] for c, b in zip(codes, begins, strict=True)])
                for audio, whole, b in zip(together, alone, begins, strict=True):
                    assert worst(audio, whole[b * SAMPLES : (b + 4) * SAMPLES]) < tolerance

    def test_what_the_others_say_does_not_matter(self, decoder):
        codes = random_codes(6)
        alone = [push(decoder, [decoder.open({}), decoder.open({})], [codes, other])[0] for other in
                 (codes, random_codes(6, 1), np.zeros((6, 16), np.int32))]  # fmt: skip
        assert all(np.array_equal(a, alone[0]) for a in alone)

    def test_chunks_of_different_lengths_do_not(self, decoder):
        state = decoder.open({})
        keys = [decoder.batch_key(state, {"codes": random_codes(n)}) for n in (1, 1, 2)]
        assert keys[0] == keys[1] != keys[2]
        assert keys[0] != decoder.batch_key(state, {"codes": random_codes(1), "silent": True})


class TestState:
    def test_it_has_the_same_size_however_long_a_session_is(self, decoder):
        state = decoder.open({})
        packed = state.packed
        storage = packed.untyped_storage()
        size = storage.nbytes()
        for turn in range(30):
            push(decoder, [state], [random_codes(8, turn)])
        assert state.position == 240 > WINDOW + 200
        assert state.packed is packed and packed.untyped_storage().nbytes() == size == 4 * decoder.network.layout.size

    def test_a_step_keeps_no_tensor_of_its_batch(self, decoder):
        """Given sessions that shared a step, when one is dropped, then its state is."""
        states = [decoder.open({}) for _ in range(3)]
        push(decoder, states, [random_codes(2)] * 3)
        gone = weakref.ref(states[0].packed)
        del states[0]
        assert gone() is None
        assert all(s.packed.untyped_storage().nbytes() == 4 * decoder.network.layout.size for s in states)

    def test_its_genuine_size_is_known(self):
        from omni_plugin_qwen3_tts.checkpoints import speech_tokenizer_config
        from omni_plugin_qwen3_tts.codec_decoder import empty_network
        from omni_plugin_qwen3_tts.config import Qwen3TTSTokenizer12HzConfig

        with torch.device("meta"):
            network = empty_network(Qwen3TTSTokenizer12HzConfig(**speech_tokenizer_config("1.7b")).decoder_config)
        attention = sum(np.prod(m.past_shape) for m in network.modules() if isinstance(m, SlidingAttention))
        assert attention == 8 * 2 * 16 * 71 * 64 and network.layout.size == 1_298_496 and network.reach == 10

    def test_parts_do_not_overlap(self, decoder):
        network = decoder.network
        packed = torch.zeros(1, network.layout.size)
        layout = PastLayout(network)
        layers = [m for m in network.modules() if hasattr(m, "past_shape")]
        for layer in layers:
            layout.view(layer, packed).add_(1)
        assert packed.max() == 1 and int(packed.sum()) == sum(int(np.prod(layer.past_shape)) for layer in layers)


class TestRefusals:
    @pytest.mark.parametrize(
        ("codes", "message"),
        [
            (np.zeros((3, 15), np.int32), r"int32 \[3, 15\]; expected integers \[frames, 16\]"),
            (np.zeros((0, 16), np.int32), r"int32 \[0, 16\]"),
            (np.zeros(16, np.int32), r"int32 \[16\]"),
            (np.zeros((1, 16), np.float32), "float32"),
            (np.full((1, 16), 256), "from 256 to 256; expected 0 to 255"),
            (np.full((1, 16), -1), "from -1 to -1"),
        ],
    )
    def test_codes_that_are_none(self, decoder, codes, message):
        with pytest.raises(ValueError, match=message):
            decoder.batch_key(decoder.open({}), {"codes": codes})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"codec_dtype": "float8"}, "codec_dtype is 'float8'; .* runs in auto, float32, bfloat16, float16"),
            ({"kernels": "fast"}, "kernels is 'fast'; the codec's decoder has 'pytorch' and 'fused'"),
            ({"kernels": "fused"}, "kernels 'fused' are for CUDA; this stage runs on cpu"),
            ({"max_sessions": 8}, "max_sessions is of kernels 'fused'; 'pytorch' ones take as many as there are"),
            ({"max_sessions": 0}, "max_sessions is 0; expected a number of at least 1"),
        ],
    )
    def test_options_of_the_stage(self, checkpoint_of, options, message):
        with pytest.raises(ConfigError, match=message):
            load(checkpoint_of("base"), **options)

    def test_an_option_of_a_session(self, decoder):
        with pytest.raises(ValueError, match="unknown options speed; there are none"):
            decoder.open({"speed": 2})

    @pytest.fixture
    def folder(self, checkpoint_of, tmp_path):
        """A copy of a checkpoint to spoil."""
        return shutil.copytree(checkpoint_of("custom-voice"), tmp_path / "copy")

    def spoil(self, folder, change):
        file = folder / "speech_tokenizer" / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    def test_a_missing_tensor(self, folder):
        self.spoil(folder, lambda tensors: tensors.pop("decoder.pre_conv.conv.bias"))
        with pytest.raises(CheckpointError, match=r"decoder do not fit.* 1 missing \(decoder.pre_conv.conv.bias\)"):
            load(folder)

    def test_an_unexpected_tensor(self, folder):
        self.spoil(folder, lambda tensors: tensors.update({"decoder.more": torch.zeros(1)}))
        with pytest.raises(CheckpointError, match=r"1 unexpected \(decoder.more\)"):
            load(folder)

    def test_a_tensor_of_another_shape(self, folder):
        self.spoil(folder, lambda tensors: tensors.update({"decoder.decoder.5.beta": torch.zeros(3)}))
        with pytest.raises(CheckpointError, match=r"decoder.decoder.5.beta has shape \[3\].*asks for \[4\]"):
            load(folder)

    def test_quantized_weights(self, folder):
        name = "decoder.pre_conv.conv.bias"
        self.spoil(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
        with pytest.raises(CheckpointError, match="is stored as int8"):
            load(folder)

    def test_a_folder_without_weights(self, folder):
        (folder / "speech_tokenizer" / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
            load(folder)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [("model_type", "mimi", "model_type is 'mimi'"), ("decoder_config", 3, "not a usable configuration")],
    )
    def test_another_configuration(self, folder, field, value, message):
        self.configure(folder, lambda config: config.update({field: value}))
        with pytest.raises(CheckpointError, match=message):
            load(folder)

    def test_an_unknown_activation(self, folder):
        self.configure(folder, lambda config: config["decoder_config"].update(hidden_act="relu"))
        with pytest.raises(CheckpointError, match="hidden_act 'relu'; only 'silu'"):
            load(folder)

    def configure(self, folder, change):
        file = folder / "speech_tokenizer" / "config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    def test_the_encoder_s_shard_is_not_opened(self, folder):
        """Given weights in two shards, then the one without a tensor of the decoder can hold anything."""
        speech = folder / "speech_tokenizer"
        tensors = load_file(speech / "model.safetensors")
        (speech / "model.safetensors").unlink()
        index = {}
        for part in ("decoder", "encoder"):
            own = {name: t for name, t in tensors.items() if name.startswith(f"{part}.")}
            own = {name: torch.full_like(t, torch.nan) if part == "encoder" else t for name, t in own.items()}
            save_file(own, speech / f"{part}.safetensors")
            index |= dict.fromkeys(own, f"{part}.safetensors")
        (speech / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        codes = random_codes(3)
        assert np.isfinite(stream(load(folder), codes, [3])).all()


@pytest.mark.parametrize("name", ["codec_decoder:CodecDecoder", "reference_encoder:ReferenceEncoder"])
def test_after_sleep_and_wake_up_the_same_bits_come_out(checkpoint_of, name):
    """Given what a stage's process does with the module; the decoder keeps nothing of its weights meanwhile."""
    codes = random_codes(9)
    sound = np.random.default_rng(1).uniform(-0.5, 0.5, 24_000).astype(np.float32)
    decodes = name.startswith("codec")
    inputs = [codes[:4], codes[4:5], codes[5:]] if decodes else [sound]
    context = ModuleContext(checkpoint_of("base"), torch.device("cpu"), torch.float32)
    module = load_reference(f"omni_plugin_qwen3_tts.{name}").load(context)
    answers = []
    runner = ModuleRunner(module, context, answers.append, max_batch=4)

    def outputs():
        answers.clear()
        runner.receive(Open("x", {}))
        for number, values in enumerate(inputs):
            runner.receive(Push("x", number, {"codes" if decodes else "audio": values}))
            runner.step()
        runner.receive(Close("x"))
        assert [answer.error for answer in answers] == [None] * len(inputs)
        return [array.tobytes() for answer in answers for _, array in sorted(answer.values.items())]

    before = outputs()
    for _ in range(2):
        runner.receive(Sleep())
        assert not decodes or module.network is None is module.slots
        runner.receive(WakeUp())
        assert answers[-2:] == [Changed(), Changed()]
        assert outputs() == before


@pytest.mark.serve
def test_three_sessions_through_the_stage_s_process(checkpoint_of, golden_tensors):
    """Given three requests with chunks of their own, then each hears what it would hear alone."""
    tensors = golden_tensors("speech_tokenizer")
    codes = [tensors["decoder.codes"].numpy(), random_codes(24, 1), random_codes(24, 2)]
    chunks = [[4] * 6, [4] * 6, [1, 2, 4, 8, 9]]
    settings = ModuleSettings(
        "code2wav", "omni_plugin_qwen3_tts.codec_decoder:CodecDecoder", str(checkpoint_of("base")), "cpu", "float32"
    )
    engine = ModuleEngine(settings)

    async def run():
        async def one(frames, sizes):
            session = engine.open()
            ends = list(itertools.accumulate(sizes))
            parts = [
                (await session.push({"codes": frames[end - size : end]}))["audio"]
                for size, end in zip(sizes, ends, strict=True)
            ]
            session.close()
            return np.concatenate(parts)

        return await asyncio.gather(*map(one, codes, chunks))

    try:
        heard = asyncio.run(run())
    finally:
        engine.close()
    decoder = load(checkpoint_of("base"))
    assert worst(heard[0], tensors["decoder.audio"]) < ROUNDING
    for audio, frames in zip(heard, codes, strict=True):
        assert worst(audio, stream(decoder, frames, [24])) < ROUNDING
