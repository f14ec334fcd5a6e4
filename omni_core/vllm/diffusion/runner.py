"""Model runner of a diffusion stage: an engine step is a short piece of work for the running requests.

In one step those that are denoising and whose turn it is (``omni_core.diffusion.fairness``) take one denoising step,
batched with those of equal ``batch_key``; at most one request is started (text encoding) or prepared by a piece, and at
most one chunk is decoded, so that neither a burst of arrivals nor a long video stalls those under way. An exception
fails its own request and nobody else's.

A step is enqueued here and collected in ``omni_core.vllm.diffusion.output``: the device is not waited for. What a step
does follows from counts that the host keeps, so the next one can be enqueued before this one is collected, and all
ranks decide alike.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger

from omni_core.checkpoint import Checkpoint
from omni_core.diffusion.contract import DiffusionModel, DiffusionState, StageContext
from omni_core.diffusion.fairness import FairShare
from omni_core.diffusion.messages import Job, Phase, Report, StageSettings
from omni_core.diffusion.results import ResultWriter, report_failure
from omni_core.errors import OmniError, RequestError
from omni_core.plugins.declarations import load_reference
from omni_core.processes import describe
from omni_core.requests import VideoRequest, parse_request
from omni_core.vllm.activate import activate
from omni_core.vllm.diffusion.output import Chunk, Delivery, Moment, RunnerStats, Span, StepOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)

RANK_TIMEOUT = timedelta(seconds=30)
"""How long a rank that failed waits for the others to have failed too."""

_END = object()

T = TypeVar("T")


@dataclass
class RunningRequest:
    """A request in a worker, as far as it was enqueued.

    Attributes:
        pieces: what is left to prepare, between ``start`` and the first denoising step.
        chunks: its frames, once they are decoded.
        decoded: how many of them are.
        delivery: what was collected of it.
        error: why it ended early.
    """

    job: Job
    phase: Phase = "waiting"
    state: DiffusionState | None = None
    pieces: Iterator[None] | None = None
    chunks: Iterator[torch.Tensor] | None = None
    decoded: int = 0
    delivery: Delivery = field(default_factory=Delivery)
    error: str | None = None

    def report(self) -> Report:
        """Where the request stands."""
        step, num_steps = (self.state.step, self.state.num_steps) if self.state else (0, 0)
        return Report(self.phase, step, num_steps, error=self.error)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to enqueue."""
        return self.error is not None or (self.state is not None and self.decoded >= self.state.request.num_frames)

    @property
    def ready(self) -> bool:
        """Whether it was started and prepared, and has not ended."""
        return not self.ended and self.state is not None and self.pieces is None

    @property
    def denoising(self) -> bool:
        """Whether it has denoising steps to take."""
        return self.ready and self.state is not None and self.state.step < self.state.num_steps

    @property
    def decoding(self) -> bool:
        """Whether its latents are final and its frames are not."""
        return self.ready and not self.denoising

    def drop(self) -> None:
        """Give up what it holds on the device."""
        self.state = self.pieces = self.chunks = None


class DiffusionModelRunner:
    """What a stock vLLM worker delegates to in a diffusion stage.

    It has the methods of vLLM's model runners that a worker calls for a model without key-value cache.
    """

    is_pooling_model = False  # read by the GPU worker where Model Runner V2 is on
    model_memory_usage = 0

    def __init__(self, vllm_config: VllmConfig, device: torch.device, rank: int) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.rank = rank
        self.settings = StageSettings.from_config(vllm_config.additional_config)
        self.run_ahead = vllm_config.scheduler_config.async_scheduling  # on CPUs vLLM changes it later
        self.model: DiffusionModel[Any, Any]
        self.request_model: type[VideoRequest]
        self.running: dict[str, RunningRequest] = {}
        self.shares = FairShare()
        self.stats = RunnerStats()
        self.step: StepOutput
        self.enqueued: StepOutput | None = None

    # What the worker calls at start

    def load_model(self, load_dummy_weights: bool = False) -> None:
        try:
            with set_current_vllm_config(self.vllm_config):  # layers of vLLM ask for it; not every worker sets it
                self._load()
        except Exception as error:
            report_failure(self.settings.results, str(error) if isinstance(error, OmniError) else describe(error))
            raise

    def _load(self) -> None:
        activate()
        model_config = self.vllm_config.model_config
        checkpoint = Checkpoint(model_config.model)
        self.request_model = load_reference(self.settings.request)(checkpoint)
        context = StageContext(
            checkpoint=Path(model_config.model),
            device=self.device,
            dtype=model_config.dtype,
            attention=load_reference(self.settings.attention),
            options=self.settings.options,
            compile=self.settings.compile,
        )
        self.model = load_reference(self.settings.model).load(context).eval()
        if self.settings.compile:
            self._warm_up()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _warm_up(self) -> None:
        """Compile for a request with the family's defaults now, so that the first client does not wait for it."""
        try:
            request = parse_request(self.request_model, {"prompt": "warm-up", "seed": 0})
        except RequestError:
            return  # it needs more than a prompt, such as an image
        begin = time.perf_counter()
        self.model.predict([self.model.begin(request)])
        self._synchronise()
        logger.info("stage %s: compiled in %.0f s", self.settings.stage, time.perf_counter() - begin)

    def get_model(self) -> nn.Module:
        return self.model

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {}

    def initialize_kv_cache(self, kv_cache_config: Any, *arguments: Any, **options: Any) -> None:
        """There is no key-value cache."""

    def reset_mm_cache(self) -> None:
        """There is none."""

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def shutdown(self) -> None:
        for request in self.running.values():
            request.drop()
            request.delivery.abandon()
        self.running.clear()

    # One engine step

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> StepOutput | None:
        """Enqueue one unit of work for each scheduled request that has not ended.

        Where the engine runs ahead it asks for the output of a step with requests by ``sample_tokens``, and ``None``
        tells it to.
        """
        self.step = StepOutput(self.stats)
        self.enqueued = None
        for request_id in scheduler_output.finished_req_ids:
            self._forget(request_id)
        ended = {request_id for request_id, request in self.running.items() if request.ended}  # and reported so
        for new in scheduler_output.scheduled_new_reqs:
            self.running[new.req_id] = self._accept(new)
        scheduled = [i for i in scheduler_output.num_scheduled_tokens if i in self.running and i not in ended]
        self._work({request_id: self.running[request_id] for request_id in scheduled})
        if not self.run_ahead or not scheduler_output.total_num_scheduled_tokens:
            return self.step
        self.enqueued = self.step
        return None

    def sample_tokens(self, grammar_output: Any) -> StepOutput | None:
        """The step that was just enqueued; ``None`` if enqueueing it failed."""
        return self.enqueued

    def _work(self, requests: Mapping[str, RunningRequest]) -> None:
        if not requests:
            return
        self.stats.steps += 1
        self._decode(requests)
        if coming := [(i, r) for i, r in requests.items() if not r.ended and not r.ready]:
            request_id, request = coming[0]
            with self._span("encode", [request]):
                self._guarded("encode", [request], self._start, request_id, request)
        self._denoise({request_id: request for request_id, request in requests.items() if request.denoising})
        self.step.reports = {i: (request.report(), request.delivery) for i, request in requests.items()}

    def _forget(self, request_id: str) -> None:
        self.shares.leave(request_id)
        if (request := self.running.pop(request_id, None)) is not None:
            request.drop()
            self.step.dropped.append(request.delivery)

    def _accept(self, new: Any) -> RunningRequest:
        try:
            return RunningRequest(Job.from_extra_args(new.sampling_params.extra_args))
        except (TypeError, ValueError) as error:
            return RunningRequest(Job({}), error=str(error))

    @contextmanager
    def _span(self, phase: Phase, requests: Sequence[RunningRequest]) -> Iterator[None]:
        """Work in ``phase``: its time counts for those of ``requests`` that did not fail in it."""
        begin = Moment(self.device)
        yield
        if worked := [request for request in requests if request.error is None]:
            for request in worked:
                request.phase = phase
            deliveries = [request.delivery for request in worked]
            self.step.spans.append(Span(phase, deliveries, begin, Moment(self.device)))

    def _guarded(
        self, phase: Phase, requests: Sequence[RunningRequest], work: Callable[..., T], *arguments: Any
    ) -> T | None:
        """Run ``work``; an exception becomes the error of ``requests``."""
        try:
            return work(*arguments)
        except (Exception, SystemExit) as error:  # one request's failure must not end the engine
            self._fail(phase, requests, error)
            return None

    def _fail(self, phase: Phase, requests: Sequence[RunningRequest], error: BaseException) -> None:
        """Make ``error``, which the model raised, the end of ``requests``."""
        self._confirm(phase, error)
        logger.error("stage %s: a request failed in %s", self.settings.stage, phase, exc_info=error)
        for request in requests:
            request.error = f"{phase} failed: {describe(error)}"
            request.drop()
            self.step.dropped.append(request.delivery)

    def _confirm(self, phase: Phase, error: BaseException) -> None:
        """With several ranks: make sure that all of them failed here, or end this one.

        What a request does wrong it does on every rank, before any of them waits for another. A rank that fails alone
        (out of memory, say) leaves the others waiting inside a collective; it ends, the engine with it, and the stage
        is started again.

        It ends its process: after an exception vLLM lets a worker live on whose output it does not read, and leaving in
        order would wait for the others.
        """
        if self.vllm_config.parallel_config.world_size == 1:
            return
        self._synchronise()  # the ranks' devices are abreast, their hosts may not be
        try:
            # Not ``monitored_barrier``: only rank 0 keeps its time limit.
            torch.distributed.barrier(get_world_group().cpu_group, async_op=True).wait(RANK_TIMEOUT)
        except RuntimeError:
            logger.error("stage %s: rank %d failed alone in %s", self.settings.stage, self.rank, phase, exc_info=error)
            os._exit(1)

    def _start(self, request_id: str, request: RunningRequest) -> None:
        """Start a request, or go on preparing it."""
        if request.pieces is None:
            state = self.model.start(parse_request(self.request_model, request.job.request))
            if not isinstance(state, DiffusionState) or type(state.num_steps) is not int or state.num_steps < 1:
                raise TypeError(f"start must return a DiffusionState with num_steps of at least 1, got {state!r:.200}")
            request.state, request.pieces = state, iter(self.model.prepare(state))
        if next(request.pieces, _END) is _END:
            request.pieces = None
            self.shares.join(request_id)

    def _denoise(self, requests: Mapping[str, RunningRequest]) -> None:
        """One denoising step of each request whose turn it is."""
        groups: defaultdict[Hashable, list[str]] = defaultdict(list)
        for request_id, request in requests.items():
            key = self._guarded("denoise", [request], self._batch_key, request)
            if request.error is None:
                groups[key].append(request_id)
        for key in self.shares.choose(groups):
            group = [requests[request_id] for request_id in groups[key]]
            for request_id, request in zip(groups[key], group, strict=True):
                cost = self._guarded("denoise", [request], self.model.cost, request.state)
                self.shares.charge(request_id, cost or 0)
            self._denoise_group([request for request in group if request.error is None])

    def _batch_key(self, request: RunningRequest) -> Hashable:
        assert request.state is not None
        key = self.model.batch_key(request.state)
        hash(key)
        return key

    def _denoise_group(self, group: list[RunningRequest]) -> None:
        """One forward for the group; if it fails, one for each, so that only the request at fault fails."""
        if not group:
            return
        states = [request.state for request in group if request.state is not None]
        with self._span("denoise", group):
            try:
                predictions = self.model.predict(states)
                if len(predictions) != len(states):
                    raise TypeError(f"predict must return one tensor per state: {len(predictions)} for {len(states)}")
            except (Exception, SystemExit) as error:
                if len(group) == 1:
                    self._fail("denoise", group, error)
                    return
                self._confirm("denoise", error)
                logger.warning("stage %s: a batch of %d failed, running each alone", self.settings.stage, len(group))
            else:
                self.stats.forwards[len(group)] += 1
                for request, state, prediction in zip(group, states, predictions, strict=True):
                    self._guarded("denoise", [request], self._advance, state, prediction)
                return
        for request in group:
            self._denoise_group([request])

    def _advance(self, state: DiffusionState, prediction: torch.Tensor) -> None:
        self.model.advance(state, prediction)
        state.step += 1

    def _decode(self, requests: Mapping[str, RunningRequest]) -> None:
        """Decode one chunk of the request that was admitted first of those that wait for frames."""
        decoding = [(i, r) for i, r in requests.items() if r.decoding]
        if not decoding:
            return
        request_id, request = decoding[0]
        with self._span("decode", [request]):
            self._guarded("decode", [request], self._next_chunk, request_id, request)

    def _next_chunk(self, request_id: str, request: RunningRequest) -> None:
        assert request.state is not None
        wanted = request.state.request
        as_bytes = request.job.frame_type == "uint8"
        if request.chunks is None:
            self.shares.leave(request_id)
            request.chunks = iter(self.model.decode(request.state))
            if self.rank == 0:
                dtype = "uint8" if as_bytes else "float32"
                request.delivery.writer = ResultWriter(self.settings.results, request_id, wanted.num_frames, dtype)
        frames = next(request.chunks, None)
        if frames is None:
            raise ValueError(f"decode ended after {request.decoded} of {wanted.num_frames} frames")
        expected = (wanted.height, wanted.width, 3)
        if not frames.is_floating_point() or tuple(frames.shape[1:]) != expected:
            raise ValueError(
                f"decode must give float frames of {expected}, got {frames.dtype} {tuple(frames.shape[1:])}"
            )
        request.decoded += len(frames)
        if self.rank == 0:
            self.step.chunk = request.delivery, Chunk(frames, as_bytes, last=request.ended)

    def _synchronise(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
