"""The speech tokenizer's decoder as a module stage: frames of codes in, samples out, in chunks of any size.

A session's state is one tensor of constant size and its position. Chunks of equal length are decoded together, however
far their sessions have come. There is no tail: everything is causal and the reference cuts what transposed convolutions
give beyond the last frame, so that the last chunk is like any other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omni_core.module.contract import ModuleContext, StageModule, Values
from omni_plugin_qwen3_tts.codec_network import CodecNetwork, build_network
from omni_plugin_qwen3_tts.config import Qwen3TTSTokenizer12HzConfig
from omni_plugin_qwen3_tts.layout import speech_tokenizer_tensors
from omni_plugin_qwen3_tts.step_graphs import BatchedStep, GraphSettings
from omni_plugin_qwen3_tts.streaming_layers import Past
from omni_plugin_qwen3_tts.weights import read_config, read_part


@dataclass
class DecoderState:
    """A session's past.

    Attributes:
        packed: what the layers keep, as ``CodecNetwork.layout`` says.
        position: frames decoded.
    """

    packed: torch.Tensor
    position: int = 0


class CodecDecoder(StageModule[DecoderState]):
    """Decodes for many sessions.

    An input is ``{"codes": int [frames, groups]}``; its output is ``{"audio": float32 [frames * 1920]}``, in [-1, 1] at
    24 kHz. An input with ``"silent": True`` gives ``{}``: the frames are what the next ones continue, such as the
    reference of a cloned voice, and only the last of them are rendered as far as those need it.

    The option ``cuda_graphs`` of the stage (default true) is about CUDA alone.
    """

    def __init__(self, network: CodecNetwork, *, graphs: GraphSettings | None = None) -> None:
        super().__init__()
        self.network = network
        weight = network.pre_conv.conv.weight
        self.device, self.dtype = weight.device, weight.dtype
        size = network.layout.size
        self._decode = BatchedStep(network, size, self.dtype, self.device, graphs)
        self._prime = BatchedStep(self._advance, size, self.dtype, self.device, None)

    @classmethod
    def load(cls, context: ModuleContext) -> CodecDecoder:
        """Read ``speech_tokenizer`` of the checkpoint; of its weights only the decoder's."""
        folder = context.checkpoint / "speech_tokenizer"
        config = read_config(Qwen3TTSTokenizer12HzConfig, folder)
        stored = read_part(folder, "decoder", speech_tokenizer_tensors(config))
        network = build_network(config.decoder_config, stored, context.device, context.dtype)
        wanted = context.device.type == "cuda" and context.options.get("cuda_graphs", True)
        return cls(network, graphs=GraphSettings() if wanted else None)

    def open(self, options: Values) -> DecoderState:
        """A session at its beginning. Raises ``ValueError`` for any option: there are none."""
        if options:
            raise ValueError(f"unknown options {', '.join(sorted(options))}; there are none")
        return DecoderState(torch.zeros(self.network.layout.size, dtype=self.dtype, device=self.device))

    def batch_key(self, state: DecoderState, values: Values) -> Hashable:
        """The number of frames, and whether they are silent.

        Raises:
            ValueError: the codes are no whole frames of codes of the codebooks.
        """
        codes, groups, size = np.asarray(values["codes"]), self.network.groups, self.network.codebook_size
        if codes.ndim != 2 or codes.shape[1] != groups or len(codes) == 0 or codes.dtype.kind not in "iu":
            raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}; expected integers [frames, {groups}]")
        if codes.min() < 0 or codes.max() >= size:
            raise ValueError(f"codes are from {codes.min()} to {codes.max()}; expected 0 to {size - 1}")
        return len(codes), bool(values.get("silent", False))

    def step(self, states: Sequence[DecoderState], inputs: Sequence[Values]) -> list[dict[str, Any]]:
        """Decode one chunk of each session, all of one length."""
        codes = torch.from_numpy(np.stack([np.asarray(values["codes"]).astype(np.int64) for values in inputs]))
        silent = inputs[0].get("silent", False)
        run = self._prime if silent else self._decode
        audio = run(codes, [state.packed for state in states], [state.position for state in states])
        for state in states:
            state.position += codes.shape[1]
        if silent:
            return [{} for _ in states]
        return [{"audio": row} for row in audio.float().cpu().numpy()]

    def _advance(self, codes: torch.Tensor, packed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The states after ``codes``, without the samples that they do not depend on."""
        past = Past(self.network.layout, packed, positions)
        return self.network.render(self.network.latents(codes, past)[..., -self.network.reach :], past)
