"""The model state of a talker: what vLLM's Model Runner V2 asks a model for beyond its forward.

A frame's input is computed from what was kept of it, by position: the row of a token at position ``p`` is prompt row
``p``, or else frame ``p - prompt_length``: the embedding of its codes plus that of the text id that goes with it. No
counter is kept, so that a request that is computed anew after a preemption, or continued with more text, gives the
same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from omni_core.ar.contract import TalkerModel
from omni_core.ar.messages import JOB_KEY, Piece
from omni_core.plugins.declarations import load_reference
from omni_core.vllm.ar.channel import pack_codes
from omni_core.vllm.ar.predictor import CodeInputs, CodePredictor
from omni_core.vllm.ar.slots import Request, Rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState


class TalkerModelState(DefaultModelState):
    """Named by a family's model class in ``get_model_state_cls``."""

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: EncoderCache | None, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.talker = cast(TalkerModel, model)
        vocabulary = self.model_config.get_vocab_size()
        self.rows = Rows(self.max_num_reqs, self.max_model_len, self.talker.num_code_groups, vocabulary, device)
        self.predictor = CodePredictor(self.talker)
        self._slots: dict[str, tuple[int, Request]] = {}
        self._requests: dict[int, Request] = {}

    # Requests come and go

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        parameters = new_req_data.sampling_params
        piece = Piece.from_extra_args(parameters.extra_args if parameters else None)
        if piece is None:  # vLLM's warm-up: it must run, and nobody looks at what comes of it
            self.rows.add_nobody(req_index)
            return
        request = self.rows.add(req_index, piece)
        if new_req_data.num_computed_tokens < request.piece.prompt_length:
            request.prompt = self.talker.embed_prompt(request.piece.prompt)
            if len(request.prompt) != request.piece.prompt_length:
                raise ValueError(
                    f"the prompt has {len(request.prompt)} rows, and {request.piece.prompt_length} were announced"
                )
        self._slots[new_req_data.req_id] = (req_index, request)
        self._requests[req_index] = request

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        if (found := self._slots.pop(req_id, None)) is not None:
            slot, request = found
            request.prompt = None
            self._requests.pop(slot, None)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.rows.apply()

    # Inputs of a step

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: dict[str, list[int]], input_batch: InputBatch, req_states: RequestState
    ) -> torch.Tensor:
        count = input_batch.num_reqs
        slots = input_batch.idx_mapping[:count].long()
        if not input_batch.has_prefill:
            self.inputs_embeds[:count] = self._embed_frames(slots, input_batch.positions[:count])
            return self.inputs_embeds[: input_batch.num_tokens_after_padding]
        starts = input_batch.query_start_loc_np
        decoding = np.flatnonzero(~input_batch.is_prefilling_np[:count])
        if len(decoding):
            tokens = torch.from_numpy(starts[decoding].astype(np.int64)).to(self.device, non_blocking=True)
            chosen = torch.from_numpy(decoding).to(self.device, non_blocking=True)
            self.inputs_embeds[tokens] = self._embed_frames(slots[chosen], input_batch.positions[tokens])
        for index in np.flatnonzero(input_batch.is_prefilling_np[:count]):
            self._prefill(input_batch, int(index), slots)
        return self.inputs_embeds[: input_batch.num_tokens_after_padding]

    def _prefill(self, input_batch: InputBatch, index: int, slots: torch.Tensor) -> None:
        """The rows of one request that computes its prompt, or frames anew."""
        begin, end = (int(n) for n in input_batch.query_start_loc_np[index : index + 2])
        first = int(input_batch.num_computed_tokens_np[index])
        request = self._requests.get(int(input_batch.idx_mapping_np[index]))
        if request is not None and request.prompt is not None:
            prompt = request.prompt[first : first + end - begin]
            self.inputs_embeds[begin : begin + len(prompt)] = prompt
            begin += len(prompt)
        if begin < end:
            slot = slots[index].expand(end - begin)
            self.inputs_embeds[begin:end] = self._embed_frames(slot, input_batch.positions[begin:end])

    def _embed_frames(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inputs at ``positions`` behind the prompt, [n, hidden]."""
        rows = self.rows.slot_rows[slots]
        frames = self._frames(rows, positions)
        text = self.rows.text[rows, frames.clamp(max=self.rows.max_frames - 1)].long()
        text = torch.where(frames < self.rows.text_length[rows], text, self.talker.pad_text_id)
        embedded = self.talker.embed_frames(self.rows.codes[rows, frames].long())
        return embedded + self.talker.embed_text(text)

    def _frames(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The number of the frame at each position; what is none of a request's becomes the last, which is not kept."""
        frames = positions - self.rows.prompt_length[rows]
        return torch.where((frames >= 0) & (frames < self.rows.max_frames), frames, self.rows.max_frames)

    # After a step

    def custom_sampler(self, sampler: Sampler) -> tuple[Any, None]:
        return _FrameSampler(sampler, self), None

    def penalise(self, logits: torch.Tensor, input_batch: InputBatch) -> torch.Tensor:
        """Make what each request has drawn before less likely, as transformers does, by the request's own penalty."""
        rows = self.rows.slot_rows[input_batch.idx_mapping[: input_batch.num_reqs].long()]
        penalty = self.rows.penalty[rows][:, None]
        scores = logits.float()
        lower = torch.where(scores > 0, scores / penalty, scores * penalty)
        return torch.where(self.rows.seen[rows], lower, scores)

    def complete_frames(self, output: SamplerOutput, input_batch: InputBatch) -> None:
        """Predict the other codes of each new frame, keep them, and send them out in the place of log-probabilities."""
        count = input_batch.num_reqs
        rows = self.rows.slot_rows[input_batch.idx_mapping[:count].long()]
        first = output.sampled_token_ids[:count, 0].long()
        frames = self._frames(rows, input_batch.positions[input_batch.logits_indices[:count]] + 1)
        codes = self.predictor.predict(
            CodeInputs(
                hidden=self.talker.last_hidden[:count],
                first=first,
                frame=frames,
                seed=self.rows.seed[rows],
                temperature=self.rows.temperature[rows],
                top_k=self.rows.top_k[rows],
                top_p=self.rows.top_p[rows],
            )
        )
        kept = torch.where(output.num_sampled[:count] > 0, frames, self.rows.max_frames)
        self.rows.codes[rows, kept] = codes.to(torch.int16)
        keeping = torch.where(output.num_sampled[:count] > 0, rows, self.rows.nobody)
        self.rows.seen[keeping, first] = True
        output.logprobs_tensors = LogprobsTensors(
            pack_codes(codes),
            torch.zeros(codes.shape, dtype=torch.float32, device=self.device),
            torch.zeros(count, dtype=torch.int32, device=self.device),
        )

    def capture_inner_cudagraphs(self, *arguments: Any, **options: Any) -> None:
        capture = self.vllm_config.additional_config[JOB_KEY]["capture"]
        if capture is None:
            return
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        sizes = [size for size in sizes if size < self.max_num_reqs] + [self.max_num_reqs]
        self.predictor.capture(load_reference(capture), sizes, self.inputs_embeds_size, self.dtype, self.device)


class _FrameSampler:
    """vLLM's sampler, with the frame completed after it; everything else is the sampler's own."""

    def __init__(self, sampler: Sampler, state: TalkerModelState) -> None:
        self.__dict__.update(_sampler=sampler, _state=state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        output: SamplerOutput = self._sampler(self._state.penalise(logits, input_batch), input_batch)
        self._state.complete_frames(output, input_batch)
        return output


class TalkerMixin:
    """What every talker's model class does alike; put it before the model class that it is made from."""

    last_hidden: torch.Tensor

    @staticmethod
    def get_model_state_cls() -> type[TalkerModelState]:
        """vLLM's hook."""
        return TalkerModelState

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """vLLM calls it with one row for each request of the batch, just before it samples."""
        self.last_hidden = hidden_states
        logits: torch.Tensor | None = super().compute_logits(hidden_states)  # type: ignore[misc]
        return logits
