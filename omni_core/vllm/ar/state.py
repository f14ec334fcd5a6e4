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
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from omni_core.ar.contract import TalkerModel
from omni_core.ar.messages import JOB_KEY, Piece
from omni_core.plugins.declarations import load_reference
from omni_core.vllm.ar.channel import pack_codes
from omni_core.vllm.ar.frames import FrameInputs, FrameSteps
from omni_core.vllm.ar.slots import Request, Rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
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
        self._platform = vllm_config.additional_config[JOB_KEY]
        own = self._platform["sample_codes"]
        sample = None if own is None else load_reference(own)
        self.frames = FrameSteps(self.talker, self.rows, self.inputs_embeds, sample)
        self._no_scores = torch.zeros(self.max_num_reqs, self.talker.num_code_groups, device=device)
        self._no_ranks = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
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
            self.frames.embed(slots, input_batch.positions[:count])
            return self.inputs_embeds[: input_batch.num_tokens_after_padding]
        if not input_batch.is_prefilling_np[:count].all():
            # Every request's first row, without asking the device which decode; the others' are overwritten.
            begins = input_batch.query_start_loc[:count].long()
            self.inputs_embeds[begins] = self.frames.embed_frames(slots, input_batch.positions[begins])
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
            self.inputs_embeds[begin:end] = self.frames.embed_frames(slot, input_batch.positions[begin:end])

    # After a step

    def custom_sampler(self, sampler: Sampler) -> tuple[Any, None]:
        return _FrameSampler(sampler, self), None

    def sample(self, logits: torch.Tensor, input_batch: InputBatch, prefill_length: torch.Tensor) -> SamplerOutput:
        """Draw a frame for each request, and send its codes out in the place of log-probabilities."""
        count = input_batch.num_reqs
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(count),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            prefill_length,
        )
        codes = self.frames.draw(
            FrameInputs(
                logits=logits,
                hidden=self.talker.last_hidden[:count],
                slots=input_batch.idx_mapping[:count].long(),
                positions=input_batch.positions[input_batch.logits_indices[:count]] + 1,
                num_sampled=num_sampled,
            )
        )
        channel = LogprobsTensors(pack_codes(codes), self._no_scores[:count], self._no_ranks[:count])
        return SamplerOutput(
            sampled_token_ids=codes[:, :1],
            logprobs_tensors=channel,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def capture_inner_cudagraphs(self, *arguments: Any, **options: Any) -> None:
        capture = self._platform["capture"]
        if capture is None:
            return
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        sizes = [size for size in sizes if size < self.max_num_reqs] + [self.max_num_reqs]
        self.frames.capture(load_reference(capture), sizes, self.model_config.get_vocab_size(), self.dtype)


class _FrameSampler:
    """Stands where vLLM's sampler does, draws frames instead, and is the sampler's own otherwise."""

    def __init__(self, sampler: Sampler, state: TalkerModelState) -> None:
        self.__dict__.update(_sampler=sampler, _state=state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        return self._state.sample(logits, input_batch, self._sampler.req_states.prefill_len.gpu)


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
