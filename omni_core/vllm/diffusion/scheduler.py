"""Request scheduler of a diffusion stage: every admitted request takes part in every engine step.

First come, first served, up to ``max_num_seqs`` requests at a time. There is no key-value cache to share out, so
scheduling is admission; which requests share a forward is the model runner's business.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

from omni_core.diffusion.messages import Report, StageSettings
from omni_core.diffusion.results import discard_result

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class DiffusionScheduler(SchedulerInterface):
    """vLLM's ``scheduler_cls`` for diffusion stages."""

    connector = None  # EngineCore reads these two, though the interface does not have them
    ec_connector = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.log_stats = log_stats
        self.max_running = vllm_config.scheduler_config.max_num_seqs
        self.results = StageSettings.from_config(vllm_config.additional_config).results
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self._finished_ids: set[str] = set()
        self._finished_by_client: defaultdict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._pause_state = PauseState.UNPAUSED

    # Requests come and go

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        finished = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                # It ended in this engine while the abort was on its way: the front end will not take the result.
                discard_result(self.results, request_id)
                continue
            request.status = finished_status
            self._release(request)
            finished.append(request)
        return finished

    def _release(self, request: Request) -> None:
        del self.requests[request.request_id]
        if self.running.pop(request.request_id, None) is not None:
            self._finished_ids.add(request.request_id)  # tells the workers to drop its state
        else:
            self.waiting.remove(request)
        if self._finished_by_client is not None:
            self._finished_by_client[request.client_index].add(request.request_id)

    # One engine step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        admitted = self._admit()
        scheduled = [] if self._pause_state == PauseState.PAUSED_ALL else list(self.running)
        continued = [request_id for request_id in scheduled if request_id not in admitted]
        cached = CachedRequestData.make_empty()
        cached.req_ids = continued
        cached.new_block_ids = [None] * len(continued)
        cached.num_computed_tokens = [0] * len(continued)
        cached.num_output_tokens = [1] * len(continued)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [NewRequestData.from_request(r, block_ids=()) for r in admitted.values()]
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(scheduled, 1)
        output.total_num_scheduled_tokens = len(scheduled)
        output.finished_req_ids, self._finished_ids = self._finished_ids, set()
        return output

    def _admit(self) -> dict[str, Request]:
        admitted: dict[str, Request] = {}
        while self._pause_state == PauseState.UNPAUSED and self.waiting and len(self.running) < self.max_running:
            request = self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            if self.log_stats:
                request.record_event(EngineCoreEventType.SCHEDULED)
            self.running[request.request_id] = admitted[request.request_id] = request
        return admitted

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        reports: dict[str, Report] = getattr(model_runner_output, "reports", {})
        for request_id, report in reports.items():
            request = self.requests.get(request_id)
            if request is None:  # aborted while the step ran
                discard_result(self.results, request_id)
                continue
            output = EngineCoreOutput(
                request_id,
                [report.step],
                kv_transfer_params=report.to_dict(),
                events=request.take_events(),
                prefill_stats=request.take_prefill_stats(),
            )
            if report.done:
                failed = report.error is not None
                request.status = RequestStatus.FINISHED_ERROR if failed else RequestStatus.FINISHED_STOPPED
                output.finish_reason = FinishReason.ERROR if failed else FinishReason.STOP
                self._release(request)
            outputs[request.client_index].append(output)
        by_client = {client: EngineCoreOutputs(outputs=items) for client, items in outputs.items()}
        self._add_finished_sets(by_client)
        if self.log_stats:
            by_client.setdefault(0, EngineCoreOutputs())
            next(iter(by_client.values())).scheduler_stats = self.make_stats()
        return by_client

    def _add_finished_sets(self, by_client: dict[int, EngineCoreOutputs]) -> None:
        if self._finished_by_client is not None:
            for client, request_ids in self._finished_by_client.items():
                by_client.setdefault(client, EngineCoreOutputs()).finished_requests = request_ids
            self._finished_by_client.clear()

    # State that EngineCore asks for

    def has_request(self, request_id: str) -> bool:  # abstract from vLLM 0.33 on
        return request_id in self.requests

    def get_num_unfinished_requests(self) -> int:
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        return len(self.running) + (len(self.waiting) if self._pause_state == PauseState.UNPAUSED else 0)

    def has_finished_requests(self) -> bool:
        return bool(self._finished_ids)

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def make_stats(self) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        return SchedulerStats(num_running_reqs=len(self.running), num_waiting_reqs=len(self.waiting))

    def shutdown(self) -> None:
        """Nothing is held outside this object."""

    # What a diffusion stage does not have: caches, grammars, drafts

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> None:
        return None

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """There are none."""

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: SchedulerOutput) -> None:
        """There are none."""
