"""The front end's half of Qwen3-TTS: what a checkpoint can do, and what the talker is asked for a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from omni_core.ar.messages import TalkerJob, TokenSampling
from omni_core.ar.sampling import CodeSampling
from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError, RequestError
from omni_core.speech.contract import SpeechModel, Utterance
from omni_plugin_qwen3_tts.config import Qwen3TTSConfig, Qwen3TTSTokenizer12HzConfig
from omni_plugin_qwen3_tts.prompt import ROLE_TOKENS, TAIL_TOKENS, Voice, build_prompt, check_language, check_speaker
from omni_plugin_qwen3_tts.requests import NO_VOICE, Qwen3TTSRequest, TaskType
from omni_plugin_qwen3_tts.text import TextTokenizer

TASKS: Mapping[str, TaskType] = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}
"""What a checkpoint with a ``tts_model_type`` does: one thing each."""

FIRST_CHOICE = "vivian"
"""The voice of a request that names none, where the checkpoint has it."""

SMALL = "0b6"
"""``tts_model_size`` of checkpoints that were not taught to follow instructions."""

MIN_FRAMES = 2
"""The reference never ends before (``min_new_tokens``)."""

FRAMES_PER_TOKEN, FRAMES_AT_LEAST = 40, 250
"""A talker that does not find its end is stopped: at 3.2 s for each token of text, and not before 20 s. Speech takes
about a tenth of that."""


@dataclass(frozen=True)
class Generation:
    """Of ``generation_config.json``, what is used; defaults are the reference's."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_dosample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Generation:
        """From the file's content."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None})

    def samplings(self, request: Qwen3TTSRequest) -> tuple[TokenSampling, CodeSampling]:
        """How the first code of a frame is drawn, and how the others."""

        def value(name: str) -> Any:
            asked = getattr(request, name)
            return getattr(self, name) if asked is None else asked

        def temperature(name: str, sampled: bool) -> float:
            return value(name) if sampled or getattr(request, name) is not None else 0.0

        return (
            TokenSampling(
                temperature=temperature("temperature", self.do_sample),
                top_k=value("top_k"),
                top_p=value("top_p"),
                repetition_penalty=value("repetition_penalty"),
            ),
            CodeSampling(
                temperature=temperature("subtalker_temperature", self.subtalker_dosample),
                top_k=value("subtalker_top_k"),
                top_p=value("subtalker_top_p"),
            ),
        )


class Qwen3TTSSpeech(SpeechModel[Qwen3TTSRequest]):
    """See ``omni_core.speech.contract``."""

    def __init__(
        self,
        config: Qwen3TTSConfig,
        tokenizer_config: Qwen3TTSTokenizer12HzConfig,
        generation: Generation,
        text: TextTokenizer,
    ) -> None:
        self.config, self.generation, self.text = config, generation, text
        talker: Any = config.talker_config
        self.talker = talker
        self.task: TaskType = TASKS[str(config.tts_model_type)]
        self.sample_rate = tokenizer_config.output_sample_rate
        self.samples_per_frame = tokenizer_config.decode_upsample_rate
        self.num_code_groups = talker.num_code_groups
        self.end_code, self.stand_in = talker.codec_eos_token_id, talker.codec_pad_id
        self.voices, self.reserved_voices = sorted(talker.spk_id), (NO_VOICE,)

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Self:
        files = {}
        for file in ("config.json", "speech_tokenizer/config.json"):
            if not (values := checkpoint.read(file)):
                raise CheckpointError(f"{checkpoint} has no {file}: is the download complete?")
            files[file] = values
        try:
            config = Qwen3TTSConfig(**files["config.json"])
            tokenizer_config = Qwen3TTSTokenizer12HzConfig(**files["speech_tokenizer/config.json"])
            generation = Generation.read(checkpoint.read("generation_config.json"))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: its configuration cannot be read: {error}") from error
        if config.tts_model_type not in TASKS:
            raise CheckpointError(
                f"{checkpoint}: tts_model_type is {config.tts_model_type!r}; there are {', '.join(TASKS)}"
            )
        return cls(config, tokenizer_config, generation, TextTokenizer(checkpoint.local_path()))

    # What the checkpoint can do

    def check(self, request: Qwen3TTSRequest) -> None:
        if self.task == "Base" and request.task_type is None:
            self._check_unknown_voice(request)
        if request.task != self.task:
            how = "asked for with task_type" if request.task == request.task_type else "what a request like this means"
            raise RequestError(
                f"task_type {request.task!r} ({how}) is not what this model does: it is a {self.task} checkpoint "
                f"(tts_model_type {self.config.tts_model_type!r}); give task_type {self.task!r}, or serve a "
                f"{request.task} checkpoint",
                "task_type",
            )
        check_language(self.talker, request.language)
        {"CustomVoice": self._check_custom_voice, "VoiceDesign": self._check_voice_design, "Base": self._check_base}[
            self.task
        ](request)
        instruction = self.text.instruction(request.instruction) if request.instruction else []
        reference = self.text.reference(request.ref_text) if self._in_context(request) else []
        self._check_length(len(instruction) + len(reference), self.text.text(request.input))

    def _check_custom_voice(self, request: Qwen3TTSRequest) -> None:
        self._refuse_reference(request)
        check_speaker(self.talker, self._speaker(request))
        if request.instruction and self.config.tts_model_size == SMALL:
            raise RequestError(
                "this 0.6B model takes no instructions; leave them out, or serve the 1.7B model", "instructions"
            )

    def _check_voice_design(self, request: Qwen3TTSRequest) -> None:
        self._refuse_reference(request)
        if request.named_voice is not None:
            raise RequestError(
                f"voice {request.voice!r} is unknown: a VoiceDesign model has no voices; describe one in instructions",
                "voice",
            )
        if request.instructions is None:
            raise RequestError("VoiceDesign needs instructions that describe the voice", "instructions")

    def _check_base(self, request: Qwen3TTSRequest) -> None:
        if request.instruction:
            raise RequestError(
                "a Base model takes no instructions; CustomVoice and VoiceDesign models do", "instructions"
            )
        if request.stored_voice is not None:
            if self._in_context(request) and request.stored_voice.get("codes") is None:
                raise RequestError(
                    "the voice was stored as an embedding alone, which does not go with ref_text; upload both",
                    "ref_text",
                )
            return
        self._check_unknown_voice(request)
        if request.reference is None:
            raise RequestError("Base needs a voice to speak like: give ref_audio, or an uploaded voice", "ref_audio")
        if not request.x_vector_only_mode and not (request.ref_text or "").strip():
            raise RequestError(
                "Base needs ref_text, what ref_audio says; or x_vector_only_mode, to take the voice without it",
                "ref_text",
            )

    def _refuse_reference(self, request: Qwen3TTSRequest) -> None:
        given = {
            "ref_audio": request.reference is not None,
            "ref_text": request.ref_text is not None,
            "x_vector_only_mode": request.x_vector_only_mode,
        }
        for name, is_given in given.items():
            if is_given:
                raise RequestError(f"{name} is of the task Base; a {self.task} model cannot do with it", name)

    def _check_unknown_voice(self, request: Qwen3TTSRequest) -> None:
        """Uploaded voices have been put in the place of their names."""
        if request.named_voice is not None:
            raise RequestError(
                f"voice {request.voice!r} is unknown: a Base model has no voices of its own; give ref_audio, or the "
                "name of an uploaded voice",
                "voice",
            )

    def _check_length(self, beside: int, text_ids: list[int]) -> None:
        """Of a text, its tokens and as many frames must fit into the model's context, with ``beside`` rows more."""
        spoken, context = len(text_ids) - ROLE_TOKENS - TAIL_TOKENS, int(self.talker.max_position_embeddings)
        if beside + 2 * spoken > context:
            raise RequestError(
                f"input is too long: it has {spoken} tokens, and {max(0, context - beside) // 2} fit into this model's "
                f"context of {context}",
                "input",
            )

    # What the stages are asked

    def reference_options(self, request: Qwen3TTSRequest) -> Mapping[str, Any] | None:
        if request.task != "Base" or request.stored_voice is not None:
            return None
        return {"codes": self._in_context(request), "embedding": True}

    def voice_options(self, ref_text: str | None) -> Mapping[str, Any]:
        if self.task != "Base":
            raise RequestError(f"uploaded voices are of the task Base; this is a {self.task} model", "audio_sample")
        return {"codes": bool((ref_text or "").strip()), "embedding": True}

    def utterance(self, request: Qwen3TTSRequest, reference: Mapping[str, Any] | None) -> Utterance:
        text_ids = self.text.text(request.input)
        instruct_ids = self.text.instruction(request.instruction) if request.instruction else []
        voice = None if reference is None else self._voice(request, reference)
        prompt = build_prompt(
            self.config,
            text_ids,
            instruct_ids=instruct_ids,
            speaker=self._speaker(request) if self.task == "CustomVoice" else None,
            language=request.language,
            voice=voice,
            whole_text=request.whole_text,
        )
        spoken = len(text_ids) - ROLE_TOKENS - TAIL_TOKENS
        room = int(self.talker.max_position_embeddings) - prompt.length
        if room < max(MIN_FRAMES, len(prompt.text)):  # the text alone fits, see ``check``
            raise RequestError(
                f"ref_audio and input are too long together: they are {prompt.length} rows of this model's context of "
                f"{self.talker.max_position_embeddings}, and leave no room to speak",
                "ref_audio",
            )
        tokens, codes = self.generation.samplings(request)
        job = TalkerJob(
            prompt=prompt.rows,
            prompt_length=prompt.length,
            text=prompt.text,
            max_frames=min(request.max_new_tokens, room, max(FRAMES_AT_LEAST, FRAMES_PER_TOKEN * spoken)),
            min_frames=MIN_FRAMES,
            seed=request.seed or 0,
            tokens=tokens,
            codes=codes,
        )
        before = None if voice is None else voice.codes
        return Utterance(job, before, spoken + len(instruct_ids))

    def _speaker(self, request: Qwen3TTSRequest) -> str:
        default = FIRST_CHOICE if FIRST_CHOICE in self.talker.spk_id else next(iter(self.talker.spk_id), FIRST_CHOICE)
        return request.named_voice or default

    def _in_context(self, request: Qwen3TTSRequest) -> bool:
        """Whether the reference's own speech comes before what is made, beside the speaker's embedding."""
        return request.task == "Base" and not request.x_vector_only_mode and bool((request.ref_text or "").strip())

    def _voice(self, request: Qwen3TTSRequest, reference: Mapping[str, Any]) -> Voice:
        """The reference as the prompt takes it. Stored ones may be of another checkpoint, and are checked too."""
        embedding = np.asarray(reference["embedding"], np.float32)
        if embedding.shape != (self.talker.hidden_size,) or not np.isfinite(embedding).all():
            raise RequestError(
                f"the voice's embedding has the shape {list(embedding.shape)}, this model needs "
                f"[{self.talker.hidden_size}]; upload it anew",
                "voice",
            )
        if not self._in_context(request):
            return Voice(embedding)
        codes, codebook = np.asarray(reference["codes"]), self.talker.code_predictor_config.vocab_size
        if codes.ndim != 2 or codes.shape[1] != self.num_code_groups or not len(codes):
            raise RequestError(
                f"the voice's codes have the shape {list(codes.shape)}, this model needs [frames, "
                f"{self.num_code_groups}]; upload it anew",
                "voice",
            )
        if codes.min() < 0 or codes.max() >= codebook:
            raise RequestError(f"the voice has codes beyond this model's {codebook}; upload it anew", "voice")
        return Voice(embedding, codes.astype(np.int32), self.text.reference(request.ref_text or ""))
