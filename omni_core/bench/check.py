"""Whether a file is the video that was asked for, so that a server that sends garbage fast does not win."""

from __future__ import annotations

import io
from dataclasses import dataclass

import av
import numpy as np

from omni_core.bench.workload import Planned, Workload

FLAT = 0.5
"""Standard deviation, of 255 levels, below which a picture counts as one colour."""


@dataclass(frozen=True)
class Media:
    """What a video file holds.

    Attributes:
        width, height: in pixels.
        frames: number of frames; 0 where the file's header does not say.
        fps: frames per second; 0 where the file does not say.
        deviation: largest standard deviation within one colour of one frame, 0 to 127.5; ``None`` before decoding.
    """

    width: int
    height: int
    frames: int
    fps: float
    deviation: float | None = None


class BadOutput(Exception):
    """A file is not what was asked for."""


def probe(data: bytes) -> Media:
    """What the header of a video file says. Raises ``BadOutput`` if it cannot be opened."""
    try:
        with av.open(io.BytesIO(data), "r") as container:
            stream = container.streams.video[0]
            return Media(stream.width, stream.height, stream.frames, float(stream.average_rate or 0))
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise BadOutput(f"the file of {len(data)} bytes is no video: {error}") from None


def decode(data: bytes) -> Media:
    """The same from its frames, one held at a time. Raises ``BadOutput`` if it cannot be decoded."""
    found = probe(data)
    frames, deviation = 0, 0.0
    try:
        with av.open(io.BytesIO(data), "r") as container:
            for frame in container.decode(video=0):
                frames += 1
                deviation = max(deviation, float(np.std(frame.to_ndarray(format="rgb24"), axis=(0, 1)).max()))
    except (av.FFmpegError, ValueError) as error:
        raise BadOutput(f"the file cannot be decoded after {frames} frames: {error}") from None
    return Media(found.width, found.height, frames, found.fps, deviation)


def check(media: Media, planned: Planned, workload: Workload) -> None:
    """Compare with what was asked for, as far as the file and the request say. Raises ``BadOutput``."""
    size = planned.size
    if size is not None and (media.width, media.height) != (size.width, size.height):
        raise BadOutput(f"the video is {media.width}x{media.height}, not {size}")
    if media.deviation is not None and media.frames == 0:
        raise BadOutput("the video has no frame")
    if media.frames and workload.num_frames is not None and media.frames != workload.num_frames:
        raise BadOutput(f"the video has {media.frames} frames, not {workload.num_frames}")
    if media.fps and workload.fps is not None and abs(media.fps - workload.fps) > 0.01:
        raise BadOutput(f"the video has {media.fps:g} frames per second, not {workload.fps:g}")
    if media.frames and media.fps and workload.seconds is not None:
        # Models have grids: the nearest allowed number of frames is taken.
        duration, tolerance = media.frames / media.fps, max(0.25, 4 / media.fps)
        if abs(duration - workload.seconds) > tolerance:
            raise BadOutput(f"the video lasts {duration:.2f} s, not {workload.seconds:g} s")
    if media.deviation is not None and media.deviation < FLAT:
        raise BadOutput("every frame of the video is of one colour")
