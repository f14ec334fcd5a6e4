"""Requests whose answers are in the golden files, and the media in them: made here, the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

RATE = 16000
"""Of audio that goes in, in Hz; 24000 is what comes out."""

IMAGE, AUDIO, VIDEO = {"type": "image"}, {"type": "audio"}, {"type": "video"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@dataclass(frozen=True)
class Case:
    """A request, greedy throughout.

    Attributes:
        messages: of the chat, whose media are ``image()``, ``audio()`` and ``video()``.
        speaker: as users say it; any case of letters.
        thinker_tokens: tokens of text at most.
        frames: of codes at most; the talker draws one token more.
        stop: a token of text that ends it, as ``<|im_end|>`` does. Random weights never say that one.
        use_audio_in_video: whether the audio is that of the video.
    """

    messages: tuple[dict[str, Any], ...]
    speaker: str = "Ethan"
    thinker_tokens: int = 6
    frames: int = 7
    stop: int | None = None
    use_audio_in_video: bool = False


def _user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


_SYSTEM = {"role": "system", "content": [text("Be brief.")]}
_ANSWER = {"role": "assistant", "content": [text("A quiet thing.")]}

CASES = {
    "text": Case((_user(text("No.")),), frames=24),
    "system": Case((_SYSTEM, _user(text("Say the word in the middle."))), "Chelsie"),
    "two_turns": Case((_SYSTEM, _user(text("What is it?")), _ANSWER, _user(text("And why?"))), "AIDEN"),
    "stopped": Case((_user(text("Hello")),), "Aiden", thinker_tokens=40, stop=22),
    "image": Case((_user(IMAGE, text("What is this?")),)),
    "audio": Case((_user(AUDIO, text("What is this?")),)),
    "video": Case((_user(VIDEO, text("What is this?")),)),
    "audio_in_video": Case((_user(VIDEO, text("What is this?")),), use_audio_in_video=True),
    "all_media_two_turns": Case(
        (_user(IMAGE, text("This?")), _ANSWER, _user(text("Rain or"), VIDEO, text("sun:"), AUDIO)), "Chelsie"
    ),
}


def image() -> np.ndarray:
    """Colours that run into each other: uint8 ``[64, 96, 3]``."""
    y, x = np.mgrid[0:64, 0:96]
    return np.stack([x * 255 // 95, y * 255 // 63, (x * y) % 256], axis=-1).astype(np.uint8)


def video() -> np.ndarray:
    """Four frames with a square that moves: uint8 ``[4, 3, 64, 96]``."""
    frames = np.repeat(image().transpose(2, 0, 1)[None], 4, axis=0).copy()
    for index, frame in enumerate(frames):
        frame[:, 10 + 8 * index : 30 + 8 * index, 20 * index : 20 * index + 24] = 255 - 60 * index
    return frames


def audio() -> np.ndarray:
    """A tone that rises for 1.25 s, whose 125 frames become 17 tokens: float32, of int16 steps."""
    time = np.arange(RATE * 5 // 4) / RATE
    wave = 0.3 * np.sin(2 * np.pi * (200 + 150 * time) * time) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * time))
    return (np.round(wave * 32767).astype(np.int16) / 32768).astype(np.float32)


def count(case: Case, kind: str) -> int:
    """How many parts of a kind a request has; the audio of a video is one."""
    parts = [part for message in case.messages for part in message["content"]]
    return sum(part["type"] == kind for part in parts) + (kind == "audio" and case.use_audio_in_video)
