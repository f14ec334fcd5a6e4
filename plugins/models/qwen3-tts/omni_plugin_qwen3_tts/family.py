"""How a Qwen3-TTS checkpoint is served. Import-light."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError, UnsupportedCheckpoint
from omni_core.pipeline import Edge, ModuleStage, Pipeline, Stage, TalkerStage

if TYPE_CHECKING:
    from omni_plugin_qwen3_tts.requests import Qwen3TTSRequest
    from omni_plugin_qwen3_tts.speech import Qwen3TTSSpeech

TOKENIZER = "qwen3_tts_tokenizer_12hz"
CONTEXT = 8192
"""Rows of prompt and speech together: eleven minutes."""

DECODER = {"kernels": "pytorch", "cuda_graphs": True, "codec_dtype": "auto", "max_sessions": 256}
"""Options of the decoder's stage; see ``StreamingDecoder``."""


def pipeline(checkpoint: Checkpoint) -> Pipeline:
    """Talker and decoder, and for voices of one's own an encoder of references.

    Raises:
        CheckpointError: a part of the checkpoint is missing.
        UnsupportedCheckpoint: its speech tokenizer is another one.
    """
    config = checkpoint.read("config.json")
    tokenizer = checkpoint.read("speech_tokenizer/config.json")
    if not tokenizer:
        raise CheckpointError(f"{checkpoint} has no speech_tokenizer/config.json: is the download complete?")
    if tokenizer.get("model_type") != TOKENIZER:
        raise UnsupportedCheckpoint(
            f"{checkpoint}: its speech tokenizer is {tokenizer.get('model_type')!r}; only {TOKENIZER!r} is supported"
        )
    stages: list[Stage] = [
        TalkerStage(
            "talker",
            "omni_plugin_qwen3_tts.talker:stage_config",
            defaults={"max_model_len": CONTEXT, "gpu_memory_utilization": 0.6},
        ),
        ModuleStage("decoder", "omni_plugin_qwen3_tts.codec_decoder:CodecDecoder", options=DECODER),
    ]
    edges = [Edge("talker", "decoder", "codes", streams=True)]
    if config.get("tts_model_type") == "base":
        stages.append(ModuleStage("encoder", "omni_plugin_qwen3_tts.reference_encoder:ReferenceEncoder"))
        edges += [Edge("encoder", "talker", "voice"), Edge("encoder", "decoder", "codes")]
    return Pipeline(tuple(stages), tuple(edges))


def request(checkpoint: Checkpoint) -> type[Qwen3TTSRequest]:
    """The request class, the same for every checkpoint; ``speech`` knows what each can do."""
    from omni_plugin_qwen3_tts.requests import Qwen3TTSRequest

    return Qwen3TTSRequest


def speech(checkpoint: Checkpoint) -> Qwen3TTSSpeech:
    """The front end's half; raises ``CheckpointError`` where it cannot be read."""
    from omni_plugin_qwen3_tts.speech import Qwen3TTSSpeech

    return Qwen3TTSSpeech.load(checkpoint)
