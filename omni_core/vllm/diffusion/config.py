"""How vLLM sees a diffusion checkpoint: a config parser and a model class that only say "no tokens, no cache"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm import ModelRegistry
from vllm.transformers_utils.config import get_config_parser, register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

CONFIG_FORMAT = "omni_diffusion"
ARCHITECTURE = "OmniDiffusionModel"

# vLLM checks that the tensor-parallel size divides the number of heads. The family checks its own layers, so this is
# a number that every sensible size divides.
_HEADS = 5040


class OmniDiffusionModel(nn.Module):
    """What vLLM's model registry inspects. The network itself is loaded by ``DiffusionModelRunner``."""

    is_attention_free = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        raise RuntimeError("diffusion models are loaded by omni_core.vllm.diffusion.runner")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a diffusion model has no tokens")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a diffusion model has no tokens")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a diffusion model has no tokens")


class OmniDiffusionConfig(PretrainedConfig):
    """The transformers configuration that stands for any diffusion checkpoint inside vLLM."""

    model_type = CONFIG_FORMAT


class DiffusionConfigParser(ConfigParserBase):
    """Gives the same minimal configuration for every checkpoint: the family reads its own files."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        values = {
            "architectures": [ARCHITECTURE],
            "num_attention_heads": _HEADS,
            "hidden_size": _HEADS,
            "head_dim": 1,
            "num_hidden_layers": 1,
            "vocab_size": 1 << 20,
            "max_position_embeddings": 1 << 16,
        }
        return values, OmniDiffusionConfig(**values)


def register() -> None:
    """Register parser and model class with vLLM in this process; again is fine."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, OmniDiffusionModel)
    try:
        get_config_parser(CONFIG_FORMAT)
    except ValueError:
        register_config_parser(CONFIG_FORMAT)(DiffusionConfigParser)
