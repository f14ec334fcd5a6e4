"""Sound to files and back: formats, pieces, speed, sample rates, and files that are none."""

import io
import struct
import wave

import av
import numpy as np
import pytest

from omni_core import audio
from omni_core.audio import FORMATS, SoundEncoder, encode_sound, output_rate, read_sound
from omni_core.errors import RequestError

RATE = 24_000
SECONDS = 2.5


def sine(seconds=SECONDS, rate=RATE, pitch=330.0):
    return (0.4 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def pieces(samples, sizes):
    begin, turn = 0, 0
    while begin < len(samples):
        size = sizes[turn % len(sizes)]
        yield samples[begin : begin + size]
        begin, turn = begin + size, turn + 1


def encoded(samples, sizes, name, rate=RATE, **options):
    encoder = SoundEncoder(name, rate, source_rate=RATE, **options)
    parts = [encoder.encode(piece) for piece in pieces(samples, sizes)]
    return [*parts, encoder.finish()]


def decoded(data, name="wav", rate=RATE):
    """Samples and rate of a file."""
    if name == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / 32767, rate
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        frames = [f.to_ndarray().reshape(-1) for frame in container.decode(stream) for f in resampler.resample(frame)]
        return np.concatenate(frames), stream.rate


def pitch_of(samples, rate):
    return np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate / len(samples)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_decodes_to_the_sound_that_went_in(name, streamed):
    data = b"".join(encoded(sine(), [1920, 3840, 7680], name, streamed=streamed))
    samples, rate = decoded(data, name)
    assert len(samples) / rate == pytest.approx(SECONDS, abs=0.1)
    assert pitch_of(samples, rate) == pytest.approx(330, abs=2)
    assert np.sqrt(np.mean(samples[4000:-4000] ** 2)) == pytest.approx(0.4 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_come_before_the_end(name):
    parts = encoded(sine(), [1920, 3840], name)
    assert all(sum(map(len, parts[:index])) for index in range(6, len(parts)))
    assert len([part for part in parts if part]) >= 5


@pytest.mark.parametrize("name", ["mp3", "opus", "aac"])
@pytest.mark.parametrize("rate", [8_000, 11_025, 12_000, 16_000, 22_050, 32_000, 44_100, 48_000])
def test_each_sample_rate_of_a_codec_is_written(name, rate):
    if rate not in av.Codec(FORMATS[name].codec, "w").audio_rates:
        with pytest.raises(RequestError, match="sample_rate"):
            SoundEncoder(name, rate)
        return
    samples, found = decoded(b"".join(encoded(sine(), [1920], name, rate)), name)
    assert found == (48_000 if name == "opus" else rate)
    assert len(samples) / found == pytest.approx(SECONDS, abs=0.2)
    assert pitch_of(samples, found) == pytest.approx(330, abs=3)


def lossless(name, parts):
    return decoded(b"".join(parts), name)[0]


@pytest.mark.parametrize("name", ["pcm", "wav", "flac"])
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("speed", [0.25, 0.7, 1.0, 1.5, 4.0])
def test_pieces_joined_are_the_whole(name, rate, speed):
    noise = sine() + 0.1 * np.random.default_rng(0).standard_normal(len(sine())).astype(np.float32)
    whole = lossless(name, encoded(noise, [len(noise)], name, rate, speed=speed, streamed=False))
    for sizes in ([1920, 3840, 7680, 15360, 30720], [1, 100, 7000, 333]):
        assert np.array_equal(lossless(name, encoded(noise, sizes, name, rate, speed=speed)), whole)
    assert len(whole) / rate == pytest.approx(SECONDS / speed, abs=0.1)


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.25, 4.0])
def test_speed_keeps_the_pitch(speed):
    samples = lossless("wav", encoded(sine(4), [1920], "wav", speed=speed))
    assert pitch_of(samples, RATE) == pytest.approx(330, abs=4)


def test_a_wav_that_is_streamed_has_one_header_of_unknown_size_and_a_whole_one_has_its_size():
    parts = encoded(sine(), [1920], "wav")
    data = b"".join(parts)
    assert data.count(b"RIFF") == data.count(b"WAVE") == 1 and data.startswith(b"RIFF\xff\xff\xff\xff")
    assert data[36:44] == b"data\xff\xff\xff\xff" and len(data) == 44 + 2 * len(sine())
    whole = encode_sound(sine(), "wav", RATE)
    assert struct.unpack("<I", whole[4:8]) == (len(whole) - 8,)
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (len(sine()), RATE, 1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("streamed", [True, False])
def test_no_samples_are_a_file_all_the_same(name, streamed):
    data = b"".join(encoded(sine(0), [1], name, streamed=streamed))
    assert isinstance(data, bytes) and (name != "wav" or len(data) == 44)


def test_rates_that_a_format_lacks_are_refused_and_native_ones_are_met():
    assert output_rate("wav", RATE) == output_rate("opus", RATE) == RATE
    assert output_rate("opus", 22_050) == 24_000 and output_rate("opus", 44_100) == 48_000
    assert output_rate("flac", RATE, 12_345) == 12_345
    with pytest.raises(RequestError, match="opus has 8000, 12000, 16000, 24000, 48000") as refused:
        output_rate("opus", RATE, 44_100)
    assert refused.value.param == "sample_rate"


def test_a_format_without_its_encoder_is_refused_with_what_there_is(monkeypatch):
    monkeypatch.setattr(audio.av, "codecs_available", {"flac"})
    with pytest.raises(RequestError, match="can write flac, wav, pcm") as refused:
        output_rate("aac", RATE)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize("speed", [0.2, 4.1, -1, 0])
def test_a_speed_out_of_range_is_refused(speed):
    with pytest.raises(RequestError, match=r"0\.25 to 4\.0"):
        SoundEncoder("wav", RATE, speed=speed)


def written(container, codec, seconds=1.0, rate=44_100, layout="stereo"):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        both = np.repeat(sine(seconds, rate), 2 if layout == "stereo" else 1)[None]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(both), format="flt", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("wav", "pcm_s16le", 44_100), ("wav", "pcm_f32le", 8_000), ("mp3", "libmp3lame", 44_100), ("flac", "flac", 96_000),
     ("ogg", "libopus", 48_000), ("adts", "aac", 44_100), ("webm", "libopus", 48_000), ("mp4", "aac", 16_000)],
)  # fmt: skip
def test_reference_sound_is_read_from_each_container(container, codec, rate):
    samples = read_sound(written(container, codec, rate=rate), RATE)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert len(samples) / RATE == pytest.approx(1.0, abs=0.1)
    assert pitch_of(samples, RATE) == pytest.approx(330, abs=3)


WAV = encode_sound(sine(1), "wav", RATE)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"x" * 5000, "can be read"),
        (b"RIFF", "can be read"),
        (WAV[:20], "can be read"),
        (encode_sound(sine(0), "wav", RATE), "0.1 or more"),
        (encode_sound(sine(0.05), "wav", RATE), "0.1 or more"),
        (encode_sound(sine(61), "flac", RATE), "longer than 60 seconds"),
        (WAV + bytes(11 << 20), "it may have"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "can be read"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "can be read"),
        (WAV[:24] + struct.pack("<I", 1) + WAV[28:], "1 samples a second"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_reference_sound_is_refused(data, words):
    with pytest.raises(RequestError, match=words):
        read_sound(data, RATE)


def test_samples_that_are_no_numbers_are_refused():
    data = written("wav", "pcm_f32le", layout="mono")
    with pytest.raises(RequestError, match="no numbers"):
        read_sound(data[:-400] + np.full(100, np.nan, "<f4").tobytes(), RATE)
