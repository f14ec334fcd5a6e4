"""What a Base checkpoint makes of a reference voice, as a module stage: codes of the audio, and a speaker embedding.

The speech tokenizer's encoder is Mimi's, from ``transformers``, of which the first 16 codebooks count. It is float32
whatever the stage's dtype is, since a code is the nearest of many entries.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import MimiModel

from omni_core.errors import CheckpointError
from omni_core.module.contract import ModuleContext, StageModule, Values
from omni_plugin_qwen3_tts.config import Qwen3TTSConfig, Qwen3TTSSpeakerEncoderConfig, Qwen3TTSTokenizer12HzConfig
from omni_plugin_qwen3_tts.layout import model_tensors, speech_tokenizer_tensors
from omni_plugin_qwen3_tts.speaker_encoder import (
    SAMPLE_RATE,
    MelSpectrogram,
    SpeakerEncoder,
    build_speaker_encoder,
    shortest_audio,
)
from omni_speech_codec.weights import read_config, read_part

RESULTS = ("codes", "embedding")
DECODING = ("upsample", "decoder_transformer", "decoder")
"""Parts of ``MimiModel`` that speech tokenizers do not have."""

EVERYTHING = 1_000_000
"""A window longer than any audio. The reference runs a version of Mimi that attends to everything before, where newer
ones look back 10 s as the configuration says."""


@dataclass
class ReferenceState:
    """What a session wants, of ``RESULTS``."""

    wanted: frozenset[str]


class ReferenceEncoder(StageModule[ReferenceState]):
    """Encodes one waveform at a time.

    A session's options ``codes`` and ``embedding`` (default true) say what it wants. An input is ``{"audio": float32
    [samples]}``, mono at 24 kHz; its output has ``codes``, int32 [ceil(samples / 1920), groups], and ``embedding``,
    float32 [width of the talker].
    """

    def __init__(
        self,
        tokenizer: MimiModel,
        tokenizer_config: Qwen3TTSTokenizer12HzConfig,
        speaker: SpeakerEncoder,
        speaker_config: Qwen3TTSSpeakerEncoderConfig,
    ) -> None:
        super().__init__()
        self.tokenizer, self.speaker = tokenizer, speaker
        self.groups = tokenizer_config.encoder_valid_num_quantizers
        self.samples_per_frame = tokenizer_config.encode_downsample_rate
        self.shortest = shortest_audio(speaker_config)
        weight = speaker.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.mel = MelSpectrogram(speaker_config.mel_dim, self.device)

    @classmethod
    def load(cls, context: ModuleContext) -> ReferenceEncoder:
        """Read the encoders of a Base checkpoint and nothing else of it."""
        config = read_config(Qwen3TTSConfig, context.checkpoint)
        if config.tts_model_type != "base":
            raise CheckpointError(
                f"{context.checkpoint}: tts_model_type is {config.tts_model_type!r}; only 'base' has a speaker encoder"
            )
        folder = context.checkpoint / "speech_tokenizer"
        tokenizer_config = read_config(Qwen3TTSTokenizer12HzConfig, folder)
        speaker_config = config.speaker_encoder_config
        for what, rate in (
            ("speaker encoder", speaker_config.sample_rate),
            ("speech tokenizer", tokenizer_config.input_sample_rate),
        ):
            if rate != SAMPLE_RATE:
                raise CheckpointError(f"{context.checkpoint}: its {what} hears {rate} Hz; only {SAMPLE_RATE} is known")
        weights = read_part(context.checkpoint, "speaker_encoder", model_tensors(config))
        speaker = build_speaker_encoder(speaker_config, weights, context.device, context.dtype)
        weights = read_part(folder, "encoder", speech_tokenizer_tensors(tokenizer_config))
        tokenizer = _tokenizer(tokenizer_config, weights, context.device)
        return cls(tokenizer, tokenizer_config, speaker, speaker_config)

    def open(self, options: Values) -> ReferenceState:
        """Raises ``ValueError`` for an unknown option, or if nothing is wanted."""
        if unknown := sorted(options.keys() - set(RESULTS)):
            raise ValueError(f"unknown options {', '.join(unknown)}; there are {', '.join(RESULTS)}")
        wanted = frozenset(name for name in RESULTS if options.get(name, True))
        if not wanted:
            raise ValueError(f"nothing is wanted: {' and '.join(RESULTS)} are both off")
        return ReferenceState(wanted)

    def batch_key(self, state: ReferenceState, values: Values) -> Hashable:
        """Each session alone: references differ in length.

        Raises:
            ValueError: the audio is no waveform, not finite, or too short.
        """
        audio = np.asarray(values["audio"])
        if audio.ndim != 1 or audio.dtype != np.float32:
            raise ValueError(f"audio is {audio.dtype} {list(audio.shape)}; expected float32 [samples]")
        shortest = self.shortest if "embedding" in state.wanted else 1
        if len(audio) < shortest:
            raise ValueError(f"audio has {len(audio)} samples; at least {shortest} are needed")
        if not np.isfinite(audio).all():
            raise ValueError("audio has samples that are not finite")
        return id(state)

    def step(self, states: Sequence[ReferenceState], inputs: Sequence[Values]) -> list[dict[str, Any]]:
        """Encode the waveform of each session."""
        return [self._encode(state.wanted, values["audio"]) for state, values in zip(states, inputs, strict=True)]

    def _encode(self, wanted: frozenset[str], audio: np.ndarray) -> dict[str, Any]:
        waveform = torch.tensor(audio, device=self.device)
        outputs: dict[str, Any] = {}
        if "codes" in wanted:
            outputs["codes"] = self.codes(waveform).to(torch.int32).cpu().numpy()
        if "embedding" in wanted:
            outputs["embedding"] = self.speaker(self.mel(waveform).to(self.dtype)).float().cpu().numpy()
        return outputs

    def codes(self, waveform: torch.Tensor) -> torch.Tensor:
        """float32 [samples] to [frames, groups]; a frame that the audio fills in part counts."""
        frames = -(-len(waveform) // self.samples_per_frame)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # a rounded number may have another neighbour
            encoded = self.tokenizer.encode(waveform[None, None], num_quantizers=self.groups, return_dict=True)
        return encoded.audio_codes[0, :, :frames].T


def _tokenizer(
    config: Qwen3TTSTokenizer12HzConfig, stored: Mapping[str, torch.Tensor], device: torch.device
) -> MimiModel:
    """Mimi without what decodes."""
    mimi = copy.deepcopy(config.encoder_config)
    mimi.sliding_window = EVERYTHING
    model = MimiModel(mimi)
    for name in DECODING:
        setattr(model, name, None)
    model.load_state_dict(dict(stored), strict=True)
    return model.requires_grad_(False).eval().to(device)
