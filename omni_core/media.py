"""Frames to files and back, with PyAV. These functions block: call them off the event loop."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np
import numpy.typing as npt

from omni_core.errors import ConfigError

Frames = npt.NDArray[Any]
"""uint8 [frames, height, width, 3], RGB."""


def check_encoder() -> None:
    """Raise ``ConfigError`` if this build of PyAV cannot write H.264."""
    if "libx264" not in av.codecs_available:
        raise ConfigError(
            "this build of PyAV has no libx264 encoder; install PyAV's own wheel: pip install --force-reinstall av"
        )


def encode_mp4(frames: Frames, fps: int, target: str | Path) -> None:
    """Write ``frames`` as H.264 (yuv420p, CRF 18) in an MP4 whose index comes first, so that players can stream it.

    Raises:
        ValueError: ``frames`` is not uint8 [frames, height, width, 3] with even height and width.
    """
    even = frames.ndim == 4 and frames.shape[1] % 2 == 0 and frames.shape[2] % 2 == 0
    if frames.dtype != np.uint8 or not even or frames.shape[-1] != 3:
        raise ValueError(
            f"frames must be uint8 [frames, height, width, 3] of even size, got {frames.dtype} {frames.shape}"
        )
    with av.open(str(target), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "18", "preset": "veryfast"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def decode_video(source: str | Path | BinaryIO) -> tuple[Frames, float]:
    """All frames of a video file, and its frames per second."""
    with av.open(str(source) if isinstance(source, Path) else source, "r") as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames), float(stream.average_rate or 0)


def contact_sheet(frames: Frames, target: str | Path, *, columns: int = 4, limit: int = 12) -> None:
    """Write a PNG with up to ``limit`` frames, evenly spaced, side by side."""
    chosen = frames[np.unique(np.linspace(0, len(frames) - 1, min(limit, len(frames))).round().astype(int))]
    columns = min(columns, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    _, height, width, _ = chosen.shape
    sheet = np.full((rows * height, columns * width, 3), 255, np.uint8)
    for index, frame in enumerate(chosen):
        y, x = index // columns * height, index % columns * width
        sheet[y : y + height, x : x + width] = frame
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt = sheet.shape[1], sheet.shape[0], "rgb24"
    codec.time_base = Fraction(1)
    packets = [*codec.encode(av.VideoFrame.from_ndarray(sheet, format="rgb24")), *codec.encode(None)]
    Path(target).write_bytes(b"".join(bytes(packet) for packet in packets))
