"""The code predictor with kernels of its own: five launches a layer, none of which waits for weights.

Computes what ``code_predictor.CodePredictorModel`` does, with fewer roundings. What a code becomes on its way into the
predictor depends on the code alone, and is looked up.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812

from omni_core.ar.contract import ChooseCodes
from omni_speech_codec.attention_kernels import attend_frame
from omni_speech_codec.code_predictor import CodePredictorModel, Layer
from omni_speech_codec.decode_kernels import fused_linear


class FusedCodePredictor:
    """Made from a predictor whose weights are there.

    Args:
        model: the predictor.
        first_embeddings: [vocabulary, talker hidden], of first codes.
        pdl: see ``decode_kernels``.
    """

    def __init__(self, model: CodePredictorModel, first_embeddings: torch.Tensor, *, pdl: bool) -> None:
        self.model, self.pdl = model, pdl
        self.groups = model.groups
        with torch.no_grad():
            self._first = model.projection(first_embeddings)
            self._tables = torch.stack([model.projection(table) for table in model.embeddings])
        half = model.head_dim // 2
        self._cos, self._sin = (table[:, :half].float().contiguous() for table in (model.cos, model.sin))

    def __call__(self, hidden: torch.Tensor, first: torch.Tensor, choose: ChooseCodes) -> torch.Tensor:
        """See ``TalkerModel.predict_codes``."""
        model, count = self.model, len(hidden)
        layer = cast(Layer, model.layers[0])
        width = self._first.shape[1]
        x = hidden.new_empty(count, 2, width)
        x[:, 0] = model.projection(hidden)
        x[:, 1] = F.embedding(first, self._first)
        history = hidden.new_empty(len(model.layers), count, self.groups, sum(layer.sizes))
        codes = [first]
        rows = self._advance(x.view(2 * count, width), history, 0, 2).view(count, 2, width)[:, 1]
        for group in range(1, self.groups):
            logits = hidden.new_empty(count, model.heads.shape[1], dtype=torch.float32)
            self._linear(rows, model.heads[group - 1], logits, norm=model.norm)
            code, embedded = choose(logits, group, self._tables[group - 1])
            codes.append(code)
            if group < self.groups - 1:
                assert embedded is not None
                rows = self._advance(embedded, history, group + 1, 1)
        return torch.stack(codes, dim=1)

    def _advance(self, x: torch.Tensor, history: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Take ``count`` positions of every request: ``x`` [requests * count, hidden], overwritten with the result."""
        for module, past in zip(self.model.layers, history, strict=True):
            layer = cast(Layer, module)
            now = past[:, first : first + count]
            self._linear(x, layer.qkv_proj.weight, now, norm=layer.input_layernorm)
            attended = x.new_empty(len(x), layer.sizes[0])
            attend_frame(
                past,
                first,
                count,
                layer.q_norm.weight,
                layer.k_norm.weight,
                self._cos,
                self._sin,
                attended,
                layer.heads,
                layer.kv_heads,
                layer.eps,
                pdl=self.pdl,
            )
            self._linear(attended, layer.o_proj.weight, x, residual=x)
            gated = x.new_empty(len(x), layer.down_proj.weight.shape[1])
            self._linear(x, layer.gate_up_proj.weight, gated, norm=layer.post_attention_layernorm, swiglu=True)
            self._linear(gated, layer.down_proj.weight, x, residual=x)
        return x

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, norm: Any = None, **more: Any) -> None:
        scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        fused_linear(x, weight, out, norm=scale, eps=eps, pdl=self.pdl, **more)
