"""From a request to the rows of a talker's prompt, as plain data: which text, which code and what voice on each row.

The layout is the reference's (``qwen-tts`` 0.1.1, ``core/models/modeling_qwen3_tts.py``): instruction, role, a prefix
of codec tokens with language and speaker beside text padding, then the text; in context, the reference's text and
codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_core.errors import RequestError

NONE = -1
ROLE_TOKENS, TAIL_TOKENS, REFERENCE_TAIL_TOKENS = 3, 5, 2
"""Tokens of the chat template before a text, after it, and after a reference's text."""

AUTO = "auto"


@dataclass(frozen=True)
class Voice:
    """A reference voice.

    Attributes:
        embedding: float32 [hidden], of the speaker encoder.
        codes: int32 [frames, code groups] of the reference, or ``None`` to take the embedding alone.
        text_ids: the reference's text in its template; needed with ``codes``.
    """

    embedding: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int32] | None = None
    text_ids: Sequence[int] = ()


@dataclass(frozen=True)
class TalkerPrompt:
    """What a talker is given.

    Attributes:
        rows: what ``Qwen3TTSTalker.embed_prompt`` makes the rows from.
        length: how many rows these are.
        text: text ids that are added to the frames, one to each.
    """

    rows: dict[str, Any]
    length: int
    text: tuple[int, ...]


def build_prompt(
    config: Any,
    text_ids: Sequence[int],
    *,
    instruct_ids: Sequence[int] | None = None,
    speaker: str | None = None,
    language: str | None = None,
    voice: Voice | None = None,
    whole_text: bool = True,
) -> TalkerPrompt:
    """The prompt of a request.

    Args:
        config: the checkpoint's ``Qwen3TTSConfig``.
        text_ids: the text in its template.
        instruct_ids: the instruction in its template.
        speaker: a speaker of the checkpoint.
        language: a language of the checkpoint, or ``auto``.
        voice: a reference voice, instead of ``speaker``.
        whole_text: whether all of the text is in the prompt, or one token goes with each frame.

    Raises:
        RequestError: the text is empty, or the checkpoint has no such speaker or language; lists those that it has.
    """
    talker = config.talker_config
    pad, bos, eos = config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id
    spoken = list(text_ids[ROLE_TOKENS:-TAIL_TOKENS])
    if not spoken:
        raise RequestError("the text must not be empty", "input")
    rows = _Rows()
    for token in instruct_ids or ():
        rows.add(text=token)
    for token in text_ids[:ROLE_TOKENS]:
        rows.add(text=token)
    language_id = _language(talker, speaker, language)
    if language_id is None:
        prefix = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    else:
        prefix = [talker.codec_think_id, talker.codec_think_bos_id, language_id, talker.codec_think_eos_id]
    for token in prefix:
        rows.add(text=pad, codec=token)
    if speaker is not None:
        rows.add(text=pad, codec=check_speaker(talker, speaker))
    elif voice is not None:
        rows.speaker_row = rows.add(text=pad)
    rows.add(text=bos, codec=talker.codec_pad_id)
    if voice is not None and voice.codes is not None:
        trailing = _in_context(rows, talker, voice, spoken, (pad, eos), whole_text)
    elif whole_text:
        for token in [*spoken, eos]:
            rows.add(text=token, codec=talker.codec_pad_id)
        rows.add(text=pad, codec=talker.codec_bos_id)
        trailing = []
    else:
        rows.add(text=spoken[0], codec=talker.codec_bos_id)
        trailing = [*spoken[1:], eos]
    return TalkerPrompt(rows.to_data(voice), len(rows.text), tuple(trailing))


def _in_context(
    rows: _Rows, talker: Any, voice: Voice, spoken: list[int], padding: tuple[int, int], whole_text: bool
) -> list[int]:
    """The rows of the reference's text and codes, and of the text where all is in the prompt; what is left of it."""
    pad, eos = padding
    assert voice.codes is not None
    text = [*voice.text_ids[ROLE_TOKENS:-REFERENCE_TAIL_TOKENS], *spoken, eos]
    frames = len(voice.codes) + 1  # the first is the code that begins speech
    if whole_text:
        for token in text:
            rows.add(text=token, codec=talker.codec_pad_id)
        beside, trailing = [pad] * frames, []
    else:
        beside = [*text[:frames], *[pad] * (frames - len(text))]
        trailing = text[frames:]
    rows.add(text=beside[0], codec=talker.codec_bos_id)
    rows.ref_row = len(rows.text)
    for token in beside[1:]:
        rows.add(text=token)
    return trailing


class _Rows:
    """Rows as they are put together: a text id and a codec token each, or ``NONE``."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.codec: list[int] = []
        self.speaker_row = self.ref_row = NONE

    def add(self, text: int = NONE, codec: int = NONE) -> int:
        """Add a row; its number."""
        self.text.append(text)
        self.codec.append(codec)
        return len(self.text) - 1

    def to_data(self, voice: Voice | None) -> dict[str, Any]:
        codes = None if voice is None else voice.codes
        return {
            "text": self.text,
            "codec": self.codec,
            "speaker_row": self.speaker_row,
            "speaker": b"" if voice is None else np.asarray(voice.embedding, np.float32).tobytes(),
            "ref_row": self.ref_row,
            "ref_codes": b"" if codes is None else codes.astype(np.int16).tobytes(),
        }


def check_speaker(talker: Any, speaker: str) -> int:
    """The speaker's token. Raises ``RequestError`` with the speakers that there are."""
    found = talker.spk_id.get(speaker.lower())
    if found is None:
        known = ", ".join(sorted(talker.spk_id)) or "none"
        raise RequestError(f"voice {speaker!r} is unknown; this model has {known}", "voice")
    return int(found)


def _language(talker: Any, speaker: str | None, language: str | None) -> int | None:
    """The language's token; ``None`` lets the model find out. A speaker of a dialect speaks it in Chinese."""
    name = check_language(talker, language)
    if name in (AUTO, "chinese") and speaker is not None:
        dialect = talker.spk_is_dialect.get(speaker.lower())
        if dialect:
            return int(talker.codec_language_id[dialect])
    return None if name == AUTO else int(talker.codec_language_id[name])


def check_language(talker: Any, language: str | None) -> str:
    """The language's name, or ``auto``. Raises ``RequestError`` with the languages that there are."""
    name = (language or AUTO).lower()
    if name not in languages(talker):
        known = ", ".join(languages(talker))
        raise RequestError(f"language {language!r} is unknown; this model has {known}", "language")
    return name


def languages(talker: Any) -> list[str]:
    """What can be asked for: ``auto`` and the languages, without the dialects, which come with their speakers."""
    return [AUTO, *sorted(name for name in talker.codec_language_id if "dialect" not in name)]
