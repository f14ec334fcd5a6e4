"""What a family supplies of a speech model in the front end: checks, the talker's job, the codec's numbers.

The networks are elsewhere: the talker in an autoregressive stage, the codec's decoder and the reference encoder in
module stages. Nothing here needs a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from omni_core.ar.messages import TalkerJob
from omni_core.checkpoint import Checkpoint
from omni_core.errors import RequestError
from omni_core.speech.requests import SpeechRequest

RequestT = TypeVar("RequestT", bound=SpeechRequest)


@dataclass(frozen=True)
class Utterance:
    """What the stages are asked for.

    Attributes:
        job: for the talker.
        before: codes that the decoder takes before the talker's, int32 [frames, code groups], whose sound is dropped.
        text_tokens: tokens of the text and instruction, for the usage that clients are told.
    """

    job: TalkerJob
    before: npt.NDArray[np.int32] | None = None
    text_tokens: int = 0


class SpeechModel(ABC, Generic[RequestT]):
    """The front end's half of a speech family, for one checkpoint.

    Attributes:
        sample_rate: of the decoder's sound, Hz.
        samples_per_frame: samples that a frame of codes becomes.
        num_code_groups: codes of a frame.
        end_code: the talker's first code that ends a request.
        stand_in: a token of the talker that is never drawn.
        voices: names of the checkpoint's own voices.
        reserved_voices: other names that mean something in a request, and that no uploaded voice can have.
    """

    sample_rate: int
    samples_per_frame: int
    num_code_groups: int
    end_code: int
    stand_in: int
    voices: Sequence[str] = ()
    reserved_voices: Sequence[str] = ()

    @classmethod
    @abstractmethod
    def load(cls, checkpoint: Checkpoint) -> Self:
        """Read configuration and tokenizer. Raises ``CheckpointError``."""

    @abstractmethod
    def check(self, request: RequestT) -> None:
        """Raise ``RequestError`` for what this checkpoint cannot do, before anything is queued."""

    @abstractmethod
    def reference_options(self, request: RequestT) -> Mapping[str, Any] | None:
        """What the reference encoder is asked beside the sound; ``None`` where the request has no reference."""

    @abstractmethod
    def utterance(self, request: RequestT, reference: Mapping[str, Any] | None) -> Utterance:
        """What the stages are asked for; ``reference`` is the reference encoder's output, or that of a stored voice."""

    def voice_options(self, ref_text: str | None) -> Mapping[str, Any]:
        """What the reference encoder is asked beside the sample of a voice that is uploaded.

        ``ref_text`` is what is said in the sample, if that is known. What the encoder answers is kept, and comes back
        as ``SpeechRequest.stored_voice``. Raises ``RequestError`` where this checkpoint takes no such voice.
        """
        raise RequestError("this model takes no uploaded voices", "audio_sample")
