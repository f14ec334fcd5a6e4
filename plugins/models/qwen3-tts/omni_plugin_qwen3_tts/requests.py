"""What a client may ask of a Qwen3-TTS checkpoint. Names are those of the reference and of servers that came before."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_core.speech.requests import SpeechRequest

TaskType = Literal["CustomVoice", "VoiceDesign", "Base"]

NO_VOICE = "default"
"""What clients call no voice in particular, in small letters."""

_CHECKPOINT = "the checkpoint's own where absent"


class Qwen3TTSRequest(SpeechRequest):
    """Sampling that is absent is what the checkpoint's ``generation_config.json`` says.

    ``temperature``, ``top_k``, ``top_p`` and ``repetition_penalty`` are of the first code of each frame,
    ``subtalker_*`` of the others.
    """

    task_type: TaskType | None = Field(
        default=None,
        description="Base where there is a reference, else CustomVoice, if absent; VoiceDesign must be asked for.",
    )
    x_vector_only_mode: bool = Field(
        default=False, description="Take the speaker's embedding from the reference alone, without ref_text."
    )
    non_streaming_mode: bool | None = Field(
        default=None,
        description="Whether the whole text is in the prompt, or one token goes with each frame of speech; "
        "true where absent, but for Base.",
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description=f"0 takes the likeliest; {_CHECKPOINT}.")
    top_k: int | None = Field(default=None, ge=0, le=100_000, description=f"0 for all; {_CHECKPOINT}.")
    top_p: float | None = Field(default=None, gt=0, le=1, description=f"1 for all; {_CHECKPOINT}.")
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10, description=f"1 for none; {_CHECKPOINT}.")
    subtalker_temperature: float | None = Field(
        default=None, ge=0, le=2, description=f"0 takes the likeliest; {_CHECKPOINT}."
    )
    subtalker_top_k: int | None = Field(default=None, ge=0, le=100_000, description=f"0 for all; {_CHECKPOINT}.")
    subtalker_top_p: float | None = Field(default=None, gt=0, le=1, description=f"1 for all; {_CHECKPOINT}.")

    @property
    def task(self) -> TaskType:
        """The task that is asked for; a stored voice is of a reference, whatever ``task_type`` says."""
        if self.stored_voice is not None:
            return "Base"
        if self.task_type is not None:
            return self.task_type
        return "CustomVoice" if self.reference is None and self.ref_text is None else "Base"

    @property
    def named_voice(self) -> str | None:
        """The voice, in small letters; clients that must name one say ``NO_VOICE``, or nothing."""
        name = (self.voice or "").strip().lower()
        return None if name in ("", NO_VOICE) else name

    @property
    def instruction(self) -> str | None:
        """The instruction, where there is one."""
        return self.instructions if self.instructions and self.instructions.strip() else None

    @property
    def whole_text(self) -> bool:
        """``non_streaming_mode`` or its default."""
        return self.task != "Base" if self.non_streaming_mode is None else self.non_streaming_mode
