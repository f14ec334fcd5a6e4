"""A codec's decoder as a module stage: frames of codes in, samples out, in chunks of any size.

A session's state is of constant size. Chunks of equal length are decoded together, however far their sessions have
come. There is no tail: everything is causal and references cut what transposed convolutions give beyond the last
frame, so that the last chunk is like any other. Where they cut as much from the begin, the first chunk is shorter.

The network is ``codec_network.py`` in PyTorch, and a state is a tensor; or on CUDA, where it is asked for,
``fused_network.py``, in 16 bits, and a state is a slot of its pool.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from omni_core.errors import ConfigError
from omni_core.module.contract import ModuleContext, StageModule, Values
from omni_speech_codec.codec_network import CodecNetwork
from omni_speech_codec.streaming_layers import Past

if TYPE_CHECKING:
    from omni_speech_codec.step_graphs import SlotDecoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What the option ``codec_dtype`` can be, beside ``AUTO``."""

AUTO = "auto"
"""float16 for ``FUSED``, whose samples are nearer to float32's than bfloat16's; the stage's dtype otherwise."""

PYTORCH, FUSED = "pytorch", "fused"
"""What the option ``kernels`` can be: ``FUSED``, on CUDA alone, has not been seen to work on a GPU yet."""

MAX_SESSIONS = 256
"""The option ``max_sessions`` where nobody sets it: 3 MB each in 16 bits."""


@dataclass
class DecoderState:
    """A session's past.

    Attributes:
        packed: what the layers keep, as ``CodecNetwork.layout`` says; ``None`` where it is in a slot.
        slot: of the pool; ``None`` where there is none, or no longer.
        position: frames decoded.
    """

    packed: torch.Tensor | None
    slot: int | None = None
    position: int = 0


class StreamingDecoder(StageModule[DecoderState]):
    """Decodes for many sessions. A family says with ``read`` what its network is.

    An input is ``{"codes": int [frames, groups]}``; its output is ``{"audio": float32 [samples]}``, in [-1, 1]:
    ``samples_per_frame`` for each frame, without the first ``skipped`` of a session. An input with ``"silent": True``
    gives ``{}``: the frames are what the next ones continue, such as the reference of a cloned voice.

    Options of the stage: ``codec_dtype`` (see ``DTYPES`` and ``AUTO``), ``kernels`` (see ``PYTORCH``), and for fused
    ones ``cuda_graphs`` (default true) and ``max_sessions``, that can be open at a time.

    Args:
        network: what computes in PyTorch, if ``slots`` does not.
        slots: what computes with fused kernels.
        max_sessions: that ``slots`` has room for.
    """

    def __init__(
        self, network: CodecNetwork | None, slots: SlotDecoder | None = None, max_sessions: int = MAX_SESSIONS
    ) -> None:
        super().__init__()
        self.network, self.slots = network, slots
        self._free = list(range(max_sessions, 0, -1))  # 0 is nobody's
        what = slots.network if slots is not None else network
        assert what is not None
        self.groups, self.codebook_size = what.groups, what.codebook_size
        self.samples_per_frame, self.skipped = what.samples_per_frame, what.skipped
        if network is not None:
            weight = network.pre_transformer.norm.weight
            self.device, self.dtype = weight.device, weight.dtype

    @classmethod
    @abstractmethod
    def read(cls, context: ModuleContext, dtype: torch.dtype) -> CodecNetwork:
        """The network with the checkpoint's weights in ``dtype`` on the context's device.

        Raises:
            CheckpointError: it does not fit.
        """

    @classmethod
    def load(cls, context: ModuleContext) -> Self:
        """Read of the checkpoint's weights the decoder's.

        Raises:
            CheckpointError: it does not fit.
            ConfigError: an option is what it cannot be.
        """
        kernels = context.options.get("kernels", PYTORCH)
        if kernels not in (PYTORCH, FUSED):
            raise ConfigError(f"kernels is {kernels!r}; the codec's decoder has {PYTORCH!r} and {FUSED!r}")
        if (fused := kernels == FUSED) and context.device.type != "cuda":
            raise ConfigError(f"kernels {FUSED!r} are for CUDA; this stage runs on {context.device.type}")
        name = context.options.get("codec_dtype", AUTO)
        if name not in (AUTO, *DTYPES):
            raise ConfigError(f"codec_dtype is {name!r}; the codec's decoder runs in {', '.join((AUTO, *DTYPES))}")
        dtype = DTYPES[name] if name != AUTO else torch.float16 if fused else context.dtype
        sessions = context.options.get("max_sessions", MAX_SESSIONS)
        if not isinstance(sessions, int) or sessions < 1:
            raise ConfigError(f"max_sessions is {sessions!r}; expected a number of at least 1")
        if not fused and sessions != MAX_SESSIONS:
            raise ConfigError(f"max_sessions is of kernels {FUSED!r}; {PYTORCH!r} ones take as many as there are")
        network = cls.read(context, torch.float32 if fused else dtype)
        if not fused:
            return cls(network)
        # Triton comes with PyTorch for GPUs only
        from omni_speech_codec.fused_network import FusedNetwork
        from omni_speech_codec.step_graphs import GraphSettings, SlotDecoder

        with torch.inference_mode():
            slots = FusedNetwork(network, dtype, sessions + 1)
            graphs = bool(context.options.get("cuda_graphs", True))
            return cls(None, SlotDecoder(slots, GraphSettings(), graphs=graphs), sessions)

    def sleep(self) -> None:
        """Let go of all: weights are copied where graphs know their addresses, and the checkpoint has them still."""
        self.network = self.slots = None

    def wake_up(self, context: ModuleContext) -> Self:
        """Read the checkpoint again, and record again."""
        return self.load(context)

    def open(self, options: Values) -> DecoderState:
        """A session at its beginning.

        Raises:
            RuntimeError: as many sessions are open as there can be.
            ValueError: there are no options.
        """
        if options:
            raise ValueError(f"unknown options {', '.join(sorted(options))}; there are none")
        if self.network is not None:
            return DecoderState(torch.zeros(self.network.layout.size, dtype=self.dtype, device=self.device))
        if not self._free:
            raise RuntimeError("the decoder has no room for another session; raise its option max_sessions")
        return DecoderState(None, self._free.pop())

    def close(self, state: DecoderState) -> None:
        """Give the slot back; what is in it counts for nothing with the next session, which begins at position 0."""
        if state.slot is not None:
            self._free.append(state.slot)
            state.slot = None

    def batch_key(self, state: DecoderState, values: Values) -> Hashable:
        """The number of frames, and whether they are silent.

        Raises:
            ValueError: the codes are no whole frames of codes of the codebooks.
        """
        codes, groups, size = np.asarray(values["codes"]), self.groups, self.codebook_size
        if codes.ndim != 2 or codes.shape[1] != groups or len(codes) == 0 or codes.dtype.kind not in "iu":
            raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}; expected integers [frames, {groups}]")
        if codes.min() < 0 or codes.max() >= size:
            raise ValueError(f"codes are from {codes.min()} to {codes.max()}; expected 0 to {size - 1}")
        return len(codes), bool(values.get("silent", False))

    def step(self, states: Sequence[DecoderState], inputs: Sequence[Values]) -> list[dict[str, Any]]:
        """Decode one chunk of each session, all of one length."""
        codes = np.stack([np.asarray(values["codes"]) for values in inputs])
        silent = bool(inputs[0].get("silent", False))
        positions = [state.position for state in states]
        if self.slots is not None:
            slots = [state.slot for state in states if state.slot is not None]
            audio = self.slots(codes, slots, positions, silent=silent)
        else:
            audio = self._decode(codes, states, positions, silent)
        for state in states:
            state.position += codes.shape[1]
        if audio is None:
            return [{} for _ in states]
        cuts = [max(0, self.skipped - position * self.samples_per_frame) for position in positions]
        return [{"audio": row[cut:]} for row, cut in zip(audio, cuts, strict=True)]

    def _decode(
        self, codes: np.ndarray, states: Sequence[DecoderState], positions: list[int], silent: bool
    ) -> np.ndarray | None:
        """In PyTorch, of silent frames only the last being rendered, as far as the next ones need it."""
        assert self.network is not None
        frames = torch.from_numpy(codes.astype(np.int64)).to(self.device)
        kept = [state.packed for state in states if state.packed is not None]
        packed = torch.stack(kept)
        begins = torch.tensor(positions, dtype=torch.int64, device=self.device)
        x = self.network.latents(frames, Past(self.network.layout, packed, begins))
        late = max(0, codes.shape[1] - self.network.reach) if silent else 0
        audio = self.network.render(x[..., late:], Past(self.network.layout, packed, begins + late))
        torch._foreach_copy_(kept, list(packed.unbind()))
        return None if silent else audio.float().cpu().numpy()
