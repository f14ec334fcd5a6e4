"""Sound to files and back: encoders that give bytes as samples come, and the reading of reference sound.

PyAV (FFmpeg) encodes, decodes and changes speed; soxr resamples. Whatever comes out depends on the samples alone, not
on how they were cut into pieces. These functions block: call them off the event loop.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import av
import numpy as np
import numpy.typing as npt
import soxr

from omni_core.errors import RequestError

Samples = npt.NDArray[np.float32]
"""float32 [samples], mono, in [-1, 1]."""

SPEEDS = (0.25, 4.0)
SAMPLE_RATES = (8_000, 48_000)
"""The lowest and the highest that may be asked for."""

MAX_SOUND_BYTES = 10 << 20
"""Largest file of reference sound."""

MIN_SOUND_SECONDS, MAX_SOUND_SECONDS = 0.1, 60.0
"""Shortest and longest reference sound."""

UNKNOWN_SIZE = 0xFFFFFFFF
"""In the header of a WAV file that is sent while it is made."""

_TEMPO_BLOCK = 512
_CONTAINERS = "wav,mp3,flac,ogg,aac,matroska,webm,mov,mp4,m4a"  # nothing that names other files or URLs
_SOURCE_RATES = (4_000, 192_000)


@dataclass(frozen=True)
class SoundFormat:
    """A format of sound.

    Attributes:
        media_type: for HTTP.
        container, codec: FFmpeg's names; none of them for what needs no library.
        depth: FFmpeg's name of the samples that the encoder is fed.
        streamed: options of a container that is sent while it is made.
    """

    media_type: str
    container: str = ""
    codec: str = ""
    depth: str = "flt"
    streamed: Mapping[str, str] = field(default_factory=dict)


FORMATS: Mapping[str, SoundFormat] = {
    "mp3": SoundFormat("audio/mpeg", "mp3", "libmp3lame", streamed={"write_xing": "0"}),
    "opus": SoundFormat("audio/ogg", "ogg", "libopus", streamed={"page_duration": "100000"}),
    "aac": SoundFormat("audio/aac", "adts", "aac"),
    "flac": SoundFormat("audio/flac", "flac", "flac", depth="s16"),
    "wav": SoundFormat("audio/wav"),
    "pcm": SoundFormat("audio/pcm"),
}
"""Formats by OpenAI's names."""


def available_formats() -> tuple[str, ...]:
    """Names of the formats that this build of PyAV can write."""
    return tuple(name for name, kind in FORMATS.items() if not kind.codec or kind.codec in av.codecs_available)


def output_rate(name: str, native: int, wanted: int | None = None) -> int:
    """The sample rate of a file: ``wanted``, else ``native`` or the nearest above it that the format has.

    Raises:
        RequestError: this build has no such format, or the format no such sample rate.
    """
    if name not in available_formats():
        raise RequestError(
            f"response_format={name!r}: this server can write {', '.join(available_formats())}", "response_format"
        )
    codec = FORMATS[name].codec
    rates = sorted((av.Codec(codec, "w").audio_rates or ()) if codec else ())
    if wanted is None:
        return native if not rates else next((rate for rate in rates if rate >= native), rates[-1])
    if rates and wanted not in rates:
        allowed = [rate for rate in rates if SAMPLE_RATES[0] <= rate <= SAMPLE_RATES[1]]
        raise RequestError(
            f"sample_rate={wanted}: {name} has {', '.join(map(str, allowed))}; flac, wav and pcm have any",
            "sample_rate",
        )
    return wanted


def to_int16(samples: Samples) -> npt.NDArray[np.int16]:
    """The samples as 16-bit integers, little-endian."""
    return np.round(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")


def wav_header(sample_rate: int, data_bytes: int = UNKNOWN_SIZE) -> bytes:
    """The 44 bytes before the samples of a mono WAV file of 16 bits."""
    whole = UNKNOWN_SIZE if data_bytes == UNKNOWN_SIZE else data_bytes + 36
    kind = struct.pack("<IHHIIHH", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return b"RIFF" + struct.pack("<I", whole) + b"WAVEfmt " + kind + b"data" + struct.pack("<I", data_bytes)


class Tempo:
    """Changes how fast sound is and keeps its pitch: FFmpeg's ``atempo``, fed blocks of one size.

    Raises:
        RequestError: the speed is out of range.
    """

    def __init__(self, speed: float, sample_rate: int) -> None:
        if not SPEEDS[0] <= speed <= SPEEDS[1]:
            raise RequestError(f"speed={speed}: allowed: from {SPEEDS[0]} to {SPEEDS[1]}", "speed")
        self._rate, self._left, self._position = sample_rate, np.zeros(0, np.float32), 0
        self._graph = av.filter.Graph()
        self._source = last = self._graph.add_abuffer(
            sample_rate=sample_rate, format="flt", layout="mono", time_base=Fraction(1, sample_rate)
        )
        for factor in [0.5, speed / 0.5] if speed < 0.5 else [speed]:  # 0.5 is the least of one filter
            step = self._graph.add("atempo", f"{factor:.6f}")
            last.link_to(step)
            last = step
        self._sink = self._graph.add("abuffersink")
        last.link_to(self._sink)
        self._graph.configure()

    def change(self, samples: Samples, *, last: bool = False) -> Samples:
        """What is ready after these samples; all of it after the ``last``."""
        waiting = np.concatenate([self._left, samples])
        end = len(waiting) if last else len(waiting) // _TEMPO_BLOCK * _TEMPO_BLOCK
        self._left = waiting[end:]
        pieces: list[Samples] = []
        for begin in range(0, end, _TEMPO_BLOCK):
            block = waiting[begin : min(begin + _TEMPO_BLOCK, end)]
            self._source.push(_frame(block, "flt", self._rate, self._position))
            self._position += len(block)
            pieces.extend(self._ready())
        if last:
            self._source.push(None)
            pieces.extend(self._ready())
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)

    def _ready(self) -> Iterator[Samples]:
        while True:
            try:
                frame: Any = self._sink.pull()
            except (BlockingIOError, EOFError):
                return
            yield _samples(frame)


class _Encoder(Protocol):
    def encode(self, samples: Samples) -> bytes: ...

    def finish(self) -> bytes: ...


class _Plain:
    """WAV and bare samples."""

    def __init__(self, header_rate: int | None, streamed: bool) -> None:
        self._rate, self._streamed, self._begun = header_rate, streamed, False
        self._whole = bytearray()

    def encode(self, samples: Samples) -> bytes:
        data = to_int16(samples).tobytes()
        if not self._streamed:
            self._whole += data
            return b""
        return self._header() + data

    def _header(self, size: int = UNKNOWN_SIZE) -> bytes:
        if self._begun or self._rate is None:
            return b""
        self._begun = True
        return wav_header(self._rate, size)

    def finish(self) -> bytes:
        return self._header() if self._streamed else self._header(len(self._whole)) + bytes(self._whole)


class _Written:
    """A file for FFmpeg that cannot be rewound: what is written is taken out again."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


class _Container:
    """A format of FFmpeg's."""

    def __init__(self, kind: SoundFormat, sample_rate: int, streamed: bool) -> None:
        self._depth, self._rate, self._position, self._taken = kind.depth, sample_rate, 0, 0
        self._streamed = _Written() if streamed else None
        self._file = self._streamed or io.BytesIO()
        options = {"flush_packets": "1", **kind.streamed} if streamed else {}
        self._container = av.open(self._file, "w", format=kind.container, options=options)
        stream: Any = self._container.add_stream(kind.codec, rate=sample_rate, layout="mono")
        if kind.depth != "s16":
            stream.bit_rate = min(96_000, 4 * sample_rate)
        self._stream = stream

    def encode(self, samples: Samples) -> bytes:
        if len(samples):
            self._container.mux(self._stream.encode(_frame(samples, self._depth, self._rate, self._position)))
            self._position += len(samples)
        return self._take()

    def _take(self) -> bytes:
        if self._streamed is None:
            return b""
        data, self._streamed.data = bytes(self._streamed.data), bytearray()
        return data

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.getvalue() if isinstance(self._file, io.BytesIO) else self._take()


class SoundEncoder:
    """Encodes sound as it comes: ``encode`` for every piece, then ``finish`` once; joined, the bytes are the file.

    Args:
        name: a key of ``FORMATS``.
        sample_rate: of the file; see ``output_rate``.
        source_rate: of the samples, where it is another.
        speed: how much faster the sound becomes; its pitch stays.
        streamed: whether bytes come as soon as they are known. If not, all come with ``finish``, and the headers of the
            file know its size.

    Raises:
        RequestError: the format, the sample rate or the speed cannot be.
    """

    def __init__(
        self, name: str, sample_rate: int, *, source_rate: int | None = None, speed: float = 1.0, streamed: bool = True
    ) -> None:
        source_rate = source_rate or sample_rate
        self.sample_rate = output_rate(name, source_rate, sample_rate)
        self._tempo = None if speed == 1.0 else Tempo(speed, source_rate)
        self._resample = None
        if source_rate != sample_rate:
            self._resample = soxr.ResampleStream(source_rate, sample_rate, 1, dtype="float32")
        kind = FORMATS[name]
        self._encoder: _Encoder
        if kind.codec:
            self._encoder = _Container(kind, sample_rate, streamed)
        else:
            self._encoder = _Plain(sample_rate if name == "wav" else None, streamed)

    @property
    def plain(self) -> bool:
        """Whether samples are written as they are, which takes no time to speak of."""
        return isinstance(self._encoder, _Plain) and self._tempo is None and self._resample is None

    def encode(self, samples: Samples) -> bytes:
        """The bytes that these samples complete; perhaps none yet."""
        return self._encoder.encode(self._change(np.asarray(samples, np.float32), last=False))

    def _change(self, samples: Samples, *, last: bool) -> Samples:
        if self._tempo is not None:
            samples = self._tempo.change(samples, last=last)
        if self._resample is not None:
            samples = self._resample.resample_chunk(samples, last=last)
        return samples

    def finish(self) -> bytes:
        """The rest of the file."""
        rest = self._encoder.encode(self._change(np.zeros(0, np.float32), last=True))
        return rest + self._encoder.finish()


def encode_sound(samples: Samples, name: str, sample_rate: int) -> bytes:
    """A whole file."""
    encoder = SoundEncoder(name, sample_rate, streamed=False)
    return encoder.encode(samples) + encoder.finish()


def read_sound(data: bytes, sample_rate: int) -> Samples:
    """A file of sound (wav, mp3, flac, ogg, aac, webm or mp4), mono, at ``sample_rate``.

    Raises:
        RequestError: it is none of these, damaged, too short, too long or too large.
    """
    if not data:
        raise RequestError("the sound is empty")
    check_sound_size(len(data))
    try:
        samples, rate = _decode(data)
    except (av.FFmpegError, ValueError, IndexError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"the sound is no wav, mp3, flac, ogg, aac, webm or mp4 that can be read: {reason}"
        ) from None
    if len(samples) < MIN_SOUND_SECONDS * rate:
        raise RequestError(f"the sound has {len(samples) / rate:.3f} seconds; it must have {MIN_SOUND_SECONDS} or more")
    if not np.isfinite(samples).all():
        raise RequestError("the sound holds samples that are no numbers")
    if rate != sample_rate:
        samples = soxr.resample(samples, rate, sample_rate)
    return np.clip(samples, -1.0, 1.0).astype(np.float32)


def check_sound_size(size: int) -> None:
    """Raise ``RequestError`` for a file that is too large."""
    if size > MAX_SOUND_BYTES:
        raise RequestError(f"the sound has {size} bytes; it may have {MAX_SOUND_BYTES}")


def _decode(data: bytes) -> tuple[Samples, int]:
    """The samples of the first track, mono, and their rate. A format of FFmpeg's that opens other files is refused."""
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none"}
    with av.open(io.BytesIO(data), "r", options=options) as container:
        if not container.streams.audio:
            raise RequestError("the file has no sound in it")
        stream = container.streams.audio[0]
        rate = int(stream.rate or 0)
        if not _SOURCE_RATES[0] <= rate <= _SOURCE_RATES[1]:
            raise RequestError(
                f"the sound has {rate} samples a second; allowed: {_SOURCE_RATES[0]} to {_SOURCE_RATES[1]}"
            )
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        pieces: list[Samples] = []
        total = 0
        for frame in container.decode(stream):
            for mono in resampler.resample(frame):
                pieces.append(_samples(mono))
                total += len(pieces[-1])
            if total > MAX_SOUND_SECONDS * rate:
                raise RequestError(f"the sound is longer than {MAX_SOUND_SECONDS:g} seconds")
        pieces.extend(map(_samples, resampler.resample(None)))
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32), rate


def _samples(frame: av.AudioFrame) -> Samples:
    return frame.to_ndarray().reshape(-1).astype(np.float32)


def _frame(samples: Samples, depth: str, sample_rate: int, position: int) -> av.AudioFrame:
    values: Any = to_int16(samples) if depth == "s16" else samples
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values)[None], format=depth, layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = sample_rate, position, Fraction(1, sample_rate)
    return frame
