"""Model runner of a diffusion stage: an engine step is a short piece of work for the running requests.

In one step those that are denoising and whose turn it is (``omni_core.diffusion.fairness``) take one denoising step,
batched with those of equal ``batch_key``; at most one request is started (text encoding) and at most one chunk is
decoded, so that neither a burst of arrivals nor a long video stalls those under way. An exception fails its own
request and nobody else's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from omni_core.checkpoint import Checkpoint
from omni_core.diffusion.contract import DiffusionModel, DiffusionState, StageContext
from omni_core.diffusion.fairness import FairShare
from omni_core.diffusion.messages import Job, Phase, Report, StageSettings
from omni_core.diffusion.results import ResultWriter, report_failure
from omni_core.errors import OmniError, RequestError
from omni_core.plugins.declarations import load_reference
from omni_core.requests import VideoRequest, parse_request
from omni_core.vllm.activate import activate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)

RANK_TIMEOUT = timedelta(seconds=30)
"""How long a rank that failed waits for the others to have failed too."""

T = TypeVar("T")


@dataclass
class DiffusionOutput(ModelRunnerOutput):
    """A model runner's output with a report for each scheduled request."""

    reports: dict[str, Report] = field(default_factory=dict)


@dataclass
class RunningRequest:
    """A request in a worker."""

    job: Job
    phase: Phase = "waiting"
    state: DiffusionState | None = None
    chunks: Iterator[torch.Tensor] | None = None
    writer: ResultWriter | None = None
    decoded: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    result: str | None = None
    error: str | None = None

    def report(self, totals: Mapping[str, Any]) -> Report:
        """Where the request stands, with the worker's counters."""
        step, num_steps = (self.state.step, self.state.num_steps) if self.state else (0, 0)
        return Report(self.phase, step, num_steps, dict(self.seconds), self.result, self.error, totals)

    @property
    def denoising(self) -> bool:
        """Whether it has denoising steps to take."""
        return self.error is None and self.state is not None and self.state.step < self.state.num_steps

    @property
    def decoding(self) -> bool:
        """Whether its latents are final and its frames are not."""
        return self.error is None and self.state is not None and not self.denoising and self.result is None

    def drop(self) -> None:
        """Give up what it holds."""
        self.state = self.chunks = None
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None


@dataclass
class RunnerStats:
    """Counters since the start, or the last reset.

    Attributes:
        steps: engine steps with work.
        forwards: calls of ``predict`` by number of requests in the batch.
        seconds: time by phase.
    """

    steps: int = 0
    forwards: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def to_dict(self) -> dict[str, Any]:
        """The counters as plain data."""
        forwards = {str(size): count for size, count in self.forwards.items()}
        return {"steps": self.steps, "forwards": forwards, "seconds": dict(self.seconds)}


def describe(error: BaseException) -> str:
    """An exception as text that can travel: bounded, Unicode, and there even if the exception cannot say itself."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:2000].encode("utf-8", "replace").decode()


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
        self.model: DiffusionModel[Any, Any]
        self.request_model: type[VideoRequest]
        self.running: dict[str, RunningRequest] = {}
        self.shares = FairShare()
        self.stats = RunnerStats()

    # What the worker calls at start

    def load_model(self, load_dummy_weights: bool = False) -> None:
        try:
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
        self.model.predict([self.model.start(request)])
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
        for request_id in list(self.running):
            self._forget(request_id)

    # One engine step

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> ModelRunnerOutput:
        """Do one unit of work for each scheduled request and report on it."""
        for request_id in scheduler_output.finished_req_ids:
            self._forget(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self.running[new.req_id] = self._accept(new)
        scheduled = [(i, self.running[i]) for i in scheduler_output.num_scheduled_tokens if i in self.running]
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.stats.steps += 1
        self._decode(dict(scheduled))
        if unstarted := [(i, r) for i, r in scheduled if r.error is None and r.state is None]:
            self._timed("encode", [unstarted[0][1]], self._start, *unstarted[0])
        self._denoise({request_id: request for request_id, request in scheduled if request.denoising})
        ids = [request_id for request_id, _ in scheduled]
        totals = self.stats.to_dict()
        return DiffusionOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            reports={request_id: request.report(totals) for request_id, request in scheduled},
        )

    def _forget(self, request_id: str) -> None:
        self.shares.leave(request_id)
        if (request := self.running.pop(request_id, None)) is not None:
            request.drop()

    def _accept(self, new: Any) -> RunningRequest:
        try:
            return RunningRequest(Job.from_extra_args(new.sampling_params.extra_args))
        except (TypeError, ValueError) as error:
            return RunningRequest(Job({}), error=str(error))

    def _timed(
        self, phase: Phase, requests: Sequence[RunningRequest], work: Callable[..., T], *arguments: Any
    ) -> T | None:
        """Run ``work``; an exception becomes the error of ``requests``. On success their phase is ``phase``."""
        begin = time.perf_counter()
        try:
            value = work(*arguments)
            self._synchronise()
        except (Exception, SystemExit) as error:  # one request's failure must not end the engine
            self._fail(phase, requests, error)
            return None
        elapsed = time.perf_counter() - begin
        self.stats.seconds[phase] += elapsed
        for request in requests:
            request.seconds[phase] += elapsed
            request.phase = phase
        return value

    def _fail(self, phase: Phase, requests: Sequence[RunningRequest], error: BaseException) -> None:
        """Make ``error``, which the model raised, the end of ``requests``."""
        self._confirm(phase, error)
        self._record(phase, requests, error)

    def _record(self, phase: Phase, requests: Sequence[RunningRequest], error: BaseException) -> None:
        logger.error("stage %s: a request failed in %s", self.settings.stage, phase, exc_info=error)
        for request in requests:
            request.error = f"{phase} failed: {describe(error)}"
            request.drop()

    def _confirm(self, phase: Phase, error: BaseException) -> None:
        """With several ranks: make sure that all of them failed here, or end this one.

        What a request does wrong it does on every rank, before any of them waits for another. A rank that fails alone
        (out of memory, say) leaves the others waiting inside a collective; it ends, the engine with it, and the stage
        is started again.

        Raises:
            RuntimeError: another rank did not fail within ``RANK_TIMEOUT``.
        """
        if self.vllm_config.parallel_config.world_size == 1:
            return
        try:
            torch.distributed.monitored_barrier(get_world_group().cpu_group, RANK_TIMEOUT)
        except RuntimeError as alone:
            logger.error("stage %s: rank %d failed alone in %s", self.settings.stage, self.rank, phase, exc_info=error)
            raise RuntimeError(f"rank {self.rank} failed alone in {phase}: {error}") from alone

    def _start(self, request_id: str, request: RunningRequest) -> None:
        parsed = parse_request(self.request_model, request.job.request)
        state = self.model.start(parsed)
        if not isinstance(state, DiffusionState) or type(state.num_steps) is not int or state.num_steps < 1:
            raise TypeError(f"start must return a DiffusionState with num_steps of at least 1, got {state!r:.200}")
        request.state = state
        self.shares.join(request_id)

    def _denoise(self, requests: Mapping[str, RunningRequest]) -> None:
        """One denoising step of each request whose turn it is."""
        groups: defaultdict[Hashable, list[str]] = defaultdict(list)
        for request_id, request in requests.items():
            key = self._timed("denoise", [request], self._batch_key, request)
            if request.error is None:
                groups[key].append(request_id)
        for key in self.shares.choose(groups):
            group = [requests[request_id] for request_id in groups[key]]
            for request_id, request in zip(groups[key], group, strict=True):
                self.shares.charge(request_id, self._timed("denoise", [request], self.model.cost, request.state) or 0)
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
        begin = time.perf_counter()
        states = [request.state for request in group if request.state is not None]
        try:
            predictions = self.model.predict(states)
            if len(predictions) != len(states):
                raise TypeError(f"predict must return one tensor per state: {len(predictions)} for {len(states)}")
            self._synchronise()
        except (Exception, SystemExit) as error:
            if len(group) > 1:
                self._confirm("denoise", error)
                logger.warning("stage %s: a batch of %d failed, running each alone", self.settings.stage, len(group))
                for request in group:
                    self._denoise_group([request])
                return
            self._fail("denoise", group, error)
            return
        self.stats.forwards[len(group)] += 1
        elapsed = time.perf_counter() - begin
        self.stats.seconds["denoise"] += elapsed
        for request, state, prediction in zip(group, states, predictions, strict=True):
            request.seconds["denoise"] += elapsed
            self._timed("denoise", [request], self._advance, state, prediction)

    def _advance(self, state: DiffusionState, prediction: torch.Tensor) -> None:
        self.model.advance(state, prediction)
        state.step += 1

    def _decode(self, requests: Mapping[str, RunningRequest]) -> None:
        """Decode one chunk of the request that was admitted first of those that wait for frames, and write it."""
        decoding = [(i, r) for i, r in requests.items() if r.decoding]
        if not decoding:
            return
        request_id, request = decoding[0]
        chunk = self._timed("decode", [request], self._next_chunk, request_id, request)
        if chunk is not None and self.rank == 0:
            try:
                self._write(request_id, request, chunk)
            except (OSError, ValueError) as error:  # of this rank alone: the others have nothing to write
                self._record("decode", [request], error)

    def _next_chunk(self, request_id: str, request: RunningRequest) -> torch.Tensor:
        assert request.state is not None
        if request.chunks is None:
            self.shares.leave(request_id)
            request.chunks = iter(self.model.decode(request.state))
        chunk = next(request.chunks, None)
        if chunk is None:
            raise ValueError(f"decode ended after {request.decoded} of {request.state.request.num_frames} frames")
        self._check_chunk(chunk, request.state.request)
        request.decoded += len(chunk)
        if self.rank != 0 and request.decoded >= request.state.request.num_frames:
            request.result = "on rank 0"
        return chunk

    @staticmethod
    def _check_chunk(chunk: torch.Tensor, request: VideoRequest) -> None:
        expected = (request.height, request.width, 3)
        if not chunk.is_floating_point() or tuple(chunk.shape[1:]) != expected:
            raise ValueError(f"decode must give float frames of {expected}, got {chunk.dtype} {tuple(chunk.shape[1:])}")
        if not bool(torch.isfinite(chunk).all()):
            raise ValueError("the model gave frames with values that are no numbers")

    def _synchronise(self) -> None:
        """Wait for the device, so that times are true and an error belongs to the work that caused it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _write(self, request_id: str, request: RunningRequest, chunk: torch.Tensor) -> None:
        assert request.state is not None
        if request.job.frame_type == "uint8":
            chunk = chunk.mul(255).round_().clamp_(0, 255).to(torch.uint8)
        frames = chunk.cpu().numpy()
        if request.writer is None:
            num_frames = request.state.request.num_frames
            request.writer = ResultWriter(self.settings.results, request_id, num_frames, frames.dtype)
        request.writer.append(frames)
        if request.decoded >= request.writer.num_frames:
            request.result = str(request.writer.finish())
