"""Uploaded voices: what the reference encoder made of each sample, one safetensors file each, kept over restarts.

A file is written beside its place and moved there, so that it is whole or not there. A file that cannot be read, or
belongs to another checkpoint, is reported, left alone and not replaced.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from omni_core.errors import GenerationError
from omni_core.http.errors import HttpError
from omni_core.http.files import lock_folder

logger = logging.getLogger(__name__)

NAME = r"[A-Za-z0-9_-]{1,64}"
"""What a voice may be called; upper and lower case are the same."""

_KEY = "omni_voice"


@dataclass(frozen=True)
class StoredVoice:
    """An uploaded voice, as clients see it.

    Attributes:
        id: the same as ``name``.
        name: what requests call it.
        created_at: Unix time in seconds.
        ref_text: what is said in the sample; left out where it is not known.
        speaker_description: who speaks; left out where it is not known.
        object: always ``audio.voice``.
        type: always ``audio_sample``.
    """

    id: str
    name: str
    created_at: int
    ref_text: str | None = None
    speaker_description: str | None = None
    object: Literal["audio.voice"] = "audio.voice"
    type: Literal["audio_sample"] = "audio_sample"

    def to_json(self) -> dict[str, Any]:
        """The object as clients see it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class _File:
    """What stands in a file beside the tensors; ``values`` are those of the encoder that are no arrays."""

    voice: StoredVoice
    consent: str
    checkpoint: str
    values: dict[str, Any] = field(default_factory=dict)


_FILE = TypeAdapter(_File)


class VoiceStore:
    """The uploaded voices of a server.

    Args:
        folder: where they are kept; made if it is not there.
        limit: how many.
        checkpoint: what they were made for; another checkpoint's encoder means something else by its numbers.
    """

    def __init__(self, folder: Path, *, limit: int, checkpoint: str = "") -> None:
        self.folder, self.limit, self.checkpoint = folder, limit, checkpoint
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_folder(folder, "the voice store")
        self._voices: dict[str, tuple[StoredVoice, Mapping[str, Any]]] = {}
        self.skipped: list[str] = []
        for path in folder.glob("*.partial"):  # a server that was killed was writing it
            if re.fullmatch(NAME, path.stem):
                path.unlink(missing_ok=True)
        for path in sorted(folder.glob("*.safetensors")):
            try:
                voice, encoded = self._read(path)
                self._voices[voice.name.casefold()] = voice, encoded
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                self.skipped.append(path.name)
                logger.warning("The voice in %s is left out: %s", path, str(error).splitlines()[0])

    def close(self) -> None:
        """Let another server have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self, path: Path) -> tuple[StoredVoice, Mapping[str, Any]]:
        with safe_open(path, framework="numpy") as tensors:
            about = _FILE.validate_json((tensors.metadata() or {})[_KEY])
            arrays = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
        if about.voice.name != path.stem or not re.fullmatch(NAME, path.stem):
            raise ValueError(f"it is the voice {about.voice.name!r}")
        if about.checkpoint != self.checkpoint:
            raise ValueError(f"it was made for {about.checkpoint!r}, not for {self.checkpoint!r}")
        return about.voice, {**arrays, **about.values}

    def list(self) -> list[StoredVoice]:
        """All of them, by name."""
        return [voice for _, (voice, _) in sorted(self._voices.items())]

    def get(self, name: str) -> tuple[StoredVoice, Mapping[str, Any]] | None:
        """A voice and what the encoder made of its sample, or ``None`` if there is none of that name."""
        return self._voices.get(name.casefold())

    def check_free(self, name: str) -> None:
        """Raise ``HttpError`` if no voice can be added under ``name``."""
        taken = {Path(file).stem.casefold() for file in self.skipped} | self._voices.keys()
        if name.casefold() in taken:
            raise HttpError(409, f"there is a voice {name!r} already; delete it first", "name")
        if len(self._voices) >= self.limit:
            raise HttpError(400, f"there are {self.limit} uploaded voices, the most that this server keeps", "name")

    def add(
        self,
        name: str,
        encoded: Mapping[str, Any],
        *,
        consent: str,
        ref_text: str | None = None,
        speaker_description: str | None = None,
    ) -> StoredVoice:
        """Keep a voice.

        Raises:
            HttpError: it cannot be added, see ``check_free``.
            GenerationError: the encoder's answer is nothing that can be kept.
        """
        self.check_free(name)
        voice = StoredVoice(name, name, int(time.time()), ref_text, speaker_description)
        arrays = {key: value for key, value in encoded.items() if isinstance(value, np.ndarray)}
        values = {key: value for key, value in encoded.items() if key not in arrays}
        try:
            about = json.dumps(asdict(_File(voice, consent, self.checkpoint, values)))
        except (TypeError, ValueError) as error:
            raise GenerationError(f"the voice cannot be kept: {error}") from None
        whole = {key: np.ascontiguousarray(value).reshape(value.shape) for key, value in arrays.items()}
        partial = self.folder / f"{name}.partial"
        try:
            partial.write_bytes(save(whole, metadata={_KEY: about}))
            os.replace(partial, self._path(name))
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise GenerationError(f"the voice {name} cannot be written: {error.strerror}") from None
        self._voices[name.casefold()] = voice, dict(encoded)
        return voice

    def _path(self, name: str) -> Path:
        assert re.fullmatch(NAME, name)
        return self.folder / f"{name}.safetensors"

    def delete(self, name: str) -> StoredVoice | None:
        """Forget a voice and remove its file; the voice, or ``None`` if there is none of that name."""
        voice, _ = self._voices.pop(name.casefold(), (None, {}))
        if voice is not None:
            self._path(voice.name).unlink(missing_ok=True)
        return voice
