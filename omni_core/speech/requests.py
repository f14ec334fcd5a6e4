"""The request for speech: what every family has. HTTP, the Python API and the front end validate with one class."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from omni_core.ar.messages import MAX_SEED
from omni_core.requests import Prompt

SET_BY_THE_SERVER = ("reference", "stored_voice")
"""Fields that no client names."""


class SpeechRequest(BaseModel):
    """A family narrows it in a subclass, adds its own fields, and leaves out nothing.

    ``reference`` is sound to speak like, float32 [samples] at ``SpeechModel.sample_rate``, mono; HTTP makes it from
    ``ref_audio``. ``stored_voice`` is what the reference encoder made of an uploaded voice; only the server sets it. It
    then stands for ``voice``, which is ``None``, and ``ref_text`` is what was said in the voice's sample, if known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    input: Annotated[Prompt, Field(max_length=20_000)] = Field(description="What to say.")
    voice: str | None = Field(default=None, max_length=64, description="Name of a voice; the model's own where absent.")
    instructions: str | None = Field(default=None, max_length=4_000, description="How to say it.")
    language: str | None = Field(default=None, max_length=64, description="Language; found out where absent.")
    ref_text: str | None = Field(default=None, max_length=4_000, description="What the reference sound says.")
    seed: int | None = Field(default=None, ge=0, lt=MAX_SEED, description="Seed of the draws; random where absent.")
    max_new_tokens: int = Field(default=2048, ge=1, le=8192, description="The most frames of speech.")
    reference: Annotated[np.ndarray | None, WithJsonSchema({"description": "Sound to speak like."})] = Field(
        default=None, exclude=True
    )
    stored_voice: dict[str, object] | None = Field(default=None, exclude=True)
