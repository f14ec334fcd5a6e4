"""Text to embeddings: cleaning, tokenising and UMT5, as diffusers' ``WanPipeline`` does each."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ftfy
import torch
from torch import nn
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from omni_core.vllm.loading import load_weights, materialise


def clean(text: str) -> str:
    """Mend broken Unicode, resolve HTML entities, collapse white space."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


class TextEncoder(nn.Module):
    """UMT5's encoder and its tokenizer."""

    def __init__(self, tokenizer: Any, encoder: UMT5EncoderModel) -> None:
        super().__init__()
        self.tokenizer, self.encoder = tokenizer, encoder

    @classmethod
    def load(cls, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """From the checkpoint's ``tokenizer`` and ``text_encoder`` folders.

        Raises:
            CheckpointError: the weights do not fit the encoder's configuration.
        """
        with torch.device("meta"):
            encoder = UMT5EncoderModel(UMT5Config.from_pretrained(checkpoint / "text_encoder")).to(dtype)
        materialise(encoder, device)
        load_weights(encoder, checkpoint / "text_encoder")
        return cls(AutoTokenizer.from_pretrained(checkpoint / "tokenizer"), encoder.eval())

    def encode(self, texts: Sequence[str], length: int) -> torch.Tensor:
        """Embeddings [texts, length, width]: longer texts are cut, and what is beyond a text's end is zero."""
        tokens = self.tokenizer(
            [clean(text) for text in texts],
            padding="max_length",
            max_length=length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(self.encoder.device)
        hidden = self.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return hidden * tokens.attention_mask.unsqueeze(-1).to(hidden.dtype)
