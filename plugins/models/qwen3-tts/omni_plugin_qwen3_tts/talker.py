"""Qwen3-TTS's talker as a vLLM model: Qwen3's decoder over codes, with text beside them and a code predictor behind.

The configuration is that of the checkpoint's talker (``stage_config``), so that vLLM sees an ordinary decoder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from omni_core.ar.contract import ChooseCodes
from omni_core.vllm.ar.state import TalkerMixin
from omni_speech_codec.code_predictor import CodePredictorModel

if TYPE_CHECKING:
    from omni_plugin_qwen3_tts.fused_backbone import FusedBackbone
    from omni_speech_codec.fused_predictor import FusedCodePredictor

ARCHITECTURE = "Qwen3TTSTalkerForConditionalGeneration"
MOST_ROWS = 64
"""Up to so many rows the decoder takes kernels of our own."""
NUM_SUPPRESSED = 1024
"""The last tokens of the vocabulary are not codes; of them only the end code is ever drawn."""


def stage_config(config: PretrainedConfig) -> PretrainedConfig:
    """What vLLM shall see of a checkpoint's ``config.json``: the talker, with ordinary rotary embedding.

    The checkpoint declares three axes of positions, which are always equal.
    """
    if not hasattr(config, "talker_config"):  # vLLM probes with an empty one
        return config
    talker = copy.deepcopy(config.talker_config)
    for key in ("mrope_section", "interleaved", "type"):
        talker.rope_parameters.pop(key, None)
    talker.architectures = [ARCHITECTURE]
    talker.tts_pad_token_id = config.tts_pad_token_id
    return talker


class TextProjection(nn.Module):
    """Text embeddings to the talker's width."""

    def __init__(self, text_hidden: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_hidden, text_hidden)
        self.linear_fc2 = nn.Linear(text_hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class Qwen3TTSTalker(TalkerMixin, Qwen3ForCausalLM):
    """See ``omni_core.ar.contract.TalkerModel`` for the methods that are not vLLM's."""

    hf_to_vllm_mapper = Qwen3ForCausalLM.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.text_embedding.": "text_embedding.",
            "talker.model.": "model.",
            "talker.codec_head.": "lm_head.",
            "talker.text_projection.": "text_projection.",
            "talker.code_predictor.model.": "code_predictor.",
            "talker.code_predictor.small_to_mtp_projection.": "code_predictor.projection.",
            "talker.code_predictor.": "code_predictor.",
            "speaker_encoder.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        self.num_code_groups = config.num_code_groups
        self.end_code = config.codec_eos_token_id
        self.pad_text_id = config.tts_pad_token_id
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.text_projection = TextProjection(config.text_hidden_size, config.hidden_size)
        self.code_predictor = CodePredictorModel(config.code_predictor_config, config.hidden_size)
        self.fused_predictor: FusedCodePredictor | None = None
        self.fused_backbone: FusedBackbone | None = None
        suppressed = torch.zeros(config.vocab_size)
        suppressed[-NUM_SUPPRESSED:] = float("-inf")
        suppressed[self.end_code] = 0
        self.register_buffer("suppressed", suppressed, persistent=False)
        self.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if self.fused_backbone is not None and inputs_embeds is not None and len(inputs_embeds) <= MOST_ROWS:
            return self.fused_backbone(positions, inputs_embeds)
        hidden: torch.Tensor | IntermediateTensors = super().forward(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)
        return None if logits is None else logits + self.suppressed.to(logits.dtype)

    def embed_prompt(self, prompt: Mapping[str, Any]) -> torch.Tensor:
        """The rows of ``prompt.TalkerPrompt``: text, codes, speaker and reference frames, each where it has any."""
        device, dtype = self.suppressed.device, self.text_embedding.weight.dtype
        both = torch.tensor([prompt["text"], prompt["codec"]], dtype=torch.int64)
        text, codec = (both.pin_memory() if device.type != "cpu" else both).to(device, non_blocking=True)
        rows = self.embed_text(text.clamp(min=0)) * (text >= 0)[:, None]
        rows += self.model.embed_input_ids(codec.clamp(min=0)) * (codec >= 0)[:, None]
        if prompt["speaker"]:
            speaker = np.frombuffer(prompt["speaker"], np.float32).copy()
            rows[prompt["speaker_row"]] += torch.from_numpy(speaker).to(device, dtype)
        if prompt["ref_codes"]:
            codes = np.frombuffer(prompt["ref_codes"], np.int16).reshape(-1, self.num_code_groups).astype(np.int64)
            begin = prompt["ref_row"]
            rows[begin : begin + len(codes)] += self.embed_frames(torch.from_numpy(codes).to(device))
        return rows

    def embed_frames(self, codes: torch.Tensor) -> torch.Tensor:
        table = self.code_predictor.embeddings
        offsets = torch.arange(self.num_code_groups - 1, device=codes.device) * table.shape[1]
        others = F.embedding(codes[:, 1:] + offsets, table.flatten(0, 1)).sum(dim=1)
        return self.model.embed_input_ids(codes[:, 0]) + others

    def embed_text(self, text_ids: torch.Tensor) -> torch.Tensor:
        return self.text_projection(self.text_embedding(text_ids))

    def predict_codes(self, hidden: torch.Tensor, first: torch.Tensor, choose: ChooseCodes) -> torch.Tensor:
        if self.fused_predictor is not None:
            return self.fused_predictor(hidden, first, choose)
        codes: torch.Tensor = self.code_predictor(hidden, first, self.model.embed_input_ids(first), choose)
        return codes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(self._stacked(weights), mapper=self.hf_to_vllm_mapper)
        if self.suppressed.device.type != "cpu":
            self._fuse()
        return loaded

    def _fuse(self) -> None:
        """Where there is Triton, steps of few rows take kernels of our own."""
        from omni_plugin_qwen3_tts.fused_backbone import FusedBackbone
        from omni_speech_codec.fused_predictor import FusedCodePredictor

        pdl = current_platform.is_cuda() and current_platform.has_device_capability(90)
        self.fused_predictor = FusedCodePredictor(self.code_predictor, self.model.embed_tokens.weight, pdl=pdl)
        if FusedBackbone.fits(self):
            self.fused_backbone = FusedBackbone(self, MOST_ROWS, pdl=pdl)

    def _stacked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Put together what the code predictor holds in one tensor and the checkpoint in several."""
        prefix = "talker.code_predictor."
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in weights:
            if not name.startswith(prefix):
                yield name, tensor
                continue
            name = name.removeprefix(prefix).replace(".self_attn.", ".").replace(".mlp.", ".")
            target, index, count = _stack_target(name, self.num_code_groups - 1)
            if target is None:
                yield prefix + name, tensor
                continue
            held = parts.setdefault(target, {})
            held[index] = tensor
            if len(held) == count:
                ordered = [held[i] for i in range(count)]
                whole = torch.stack(ordered) if target in ("heads", "model.embeddings") else torch.cat(ordered)
                yield prefix + target, whole
                del parts[target]
        if parts:
            raise ValueError(f"the checkpoint has only some of the tensors for {', '.join(sorted(parts))}")


def _stack_target(name: str, groups: int) -> tuple[str | None, int, int]:
    """The tensor that ``name`` is a part of, which part, and of how many; ``None`` where it stands alone."""
    for kind, target in (("lm_head.", "heads"), ("model.codec_embedding.", "model.embeddings")):
        if name.startswith(kind):
            return target, int(name.removeprefix(kind).partition(".")[0]), groups
    for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for index, part in enumerate(parts):
            if f".{part}." in name:
                return name.replace(part, whole), index, len(parts)
    return None, 0, 1
