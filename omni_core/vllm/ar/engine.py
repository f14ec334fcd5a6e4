"""A talker stage as a client: vLLM's engine, whose tokens are first codes and whose log-probabilities are all codes."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from omni_core.ar.messages import JOB_KEY, Frames, Piece, TalkerJob, check_text
from omni_core.config.model import VLLM_DEFAULT, Resolved, StageConfig
from omni_core.errors import EngineDied, GenerationCancelled, GenerationError, RequestError, StageStartError
from omni_core.pipeline import TalkerStage
from omni_core.plugins.declarations import load_reference
from omni_core.speech.contract import SpeechModel
from omni_core.vllm.ar.channel import keep_codes_only, unpack_codes
from omni_core.vllm.engine import VllmEngine

MAX_INTERVAL = 8
"""The most frames that vLLM hands over at a time."""

TextStream = AsyncIterator[Sequence[int]]
"""Text ids as they become known; its end is the end of the text."""


class TalkerEngine(VllmEngine):
    """One talker stage.

    Its sleep is vLLM's, level 1, and untested on a device. By vLLM 0.32's source (``v1/worker/gpu_worker.py``,
    ``device_allocator/cumem.py``) what recorded frames address stays where it is: ``load_model`` allocates in the pool
    ``weights``, whose contents come back at the same virtual addresses. The weights are there, and the first tensors of
    ``Rows``, which ``init_model_state`` makes; those that ``Rows`` grows to later lie outside of every pool.

    Args:
        resolved: what is served.
        config: the stage's configuration.
        model: what the family says of the checkpoint: code groups, end code, and a token that is never drawn.
    """

    # A talker's graphs take a tenth of a GiB; recording them twice, to know that before, takes longer than loading.
    environment = MappingProxyType({"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"})

    def __init__(self, resolved: Resolved, config: StageConfig, model: SpeechModel[Any]) -> None:
        self.num_code_groups, self.end_code, self.stand_in = model.num_code_groups, model.end_code, model.stand_in
        self._frame_seconds = model.samples_per_frame / model.sample_rate
        self._pace = 0.0
        """Seconds that a frame of a stream takes lately; 0 while that is not known."""
        self._ended: list[str] = []
        super().__init__(config.stage.name, resolved, engine_arguments(resolved, config, self.num_code_groups))
        if not self.client.vllm_config.use_v2_model_runner:
            self.close()
            raise StageStartError(
                f"stage {self.stage!r} cannot start: vLLM chose its old model runner, which has no hooks for talkers; "
                "unset VLLM_USE_V2_MODEL_RUNNER and VLLM_TARGET_DEVICE, and see that Triton is installed"
            )

        keep_codes_only(self.client.output_processor)

    async def generate(
        self, job: TalkerJob, request_id: str, more_text: TextStream | None = None
    ) -> AsyncIterator[Frames]:
        """The frames of a request as they are made; the last has a ``finish_reason``.

        With ``more_text`` the frames wait for the text that goes with them. Closing the iterator early, or cancelling
        the task that reads it, aborts the request in the engine.

        Raises:
            RequestError: the prompt leaves no room for a frame.
            GenerationCancelled: the engine aborted the request.
            GenerationError: the engine gave the request up.
            EngineDied: the stage died.
        """
        job = self._fit(job)
        key = uuid.uuid4().hex
        told = tuple(self._ended)
        prompt: Any
        if more_text is None:
            parameters = self._parameters(job, key, job.text, job.max_frames, told)
            prompt = tokens_input([self.stand_in] * job.prompt_length)
        else:
            parameters = self._parameters(job, key, job.text, 1, told)
            prompt = self._pieces(job, key, more_text, told)
        made, pace = 0, _Pace()
        try:
            async with aclosing(self.client.generate(prompt, parameters, request_id)) as outputs:
                async for output in outputs:
                    if more_text is None and (seconds := pace.note(len(output.outputs[0].token_ids))):
                        self._pace += (0.2 if self._pace else 1.0) * (seconds - self._pace)
                    if told:  # the worker has seen them
                        self._ended = [one for one in self._ended if one not in told]
                        told = ()
                    frames = self._frames(output, job.max_frames - made, more_text is not None)
                    made += len(frames.codes)
                    if len(frames.codes) or frames.finish_reason:
                        yield frames
                    if frames.finish_reason:
                        return
            raise GenerationCancelled(f"stage {self.stage!r} aborted request {request_id}")
        except EngineDeadError as error:
            raise EngineDied(f"stage {self.stage!r} died while request {request_id} was in it") from error
        finally:
            self._ended.append(key)

    def _interval(self) -> int:
        """How many frames a new request gets at a time, after the first, which comes at once.

        Handing over costs more than a frame does, so that they come together as far as half a frame's sound goes: the
        client has the first frame's to play meanwhile.
        """
        if not self._pace:
            return 1
        return max(1, min(MAX_INTERVAL, int(self._frame_seconds / 2 / self._pace)))

    def _fit(self, job: TalkerJob) -> TalkerJob:
        """The job with no more frames than there is room for behind its prompt."""
        limit = int(self.client.vllm_config.model_config.max_model_len)
        if job.prompt_length >= limit:
            raise RequestError(
                f"the request is too long: its prompt is {job.prompt_length} rows, and stage {self.stage!r} holds "
                f"{limit} with the speech (max_model_len)",
                "input",
            )
        return replace(job, max_frames=min(job.max_frames, limit - job.prompt_length))

    def _parameters(
        self, job: TalkerJob, key: str, text: Sequence[int], max_tokens: int, ended: Sequence[str], made: int = 0
    ) -> SamplingParams:
        piece = Piece(
            key=key,
            prompt=job.prompt,
            prompt_length=job.prompt_length,
            seed=job.seed,
            codes=job.codes,
            tokens=job.tokens,
            min_frames=job.min_frames,
            text=text,
            ended=ended,
        )
        return SamplingParams(  # vLLM's own sampler never runs
            temperature=0.0,
            min_tokens=min(max(0, job.min_frames - made), max_tokens),
            max_tokens=max_tokens,
            stop_token_ids=[self.end_code],
            ignore_eos=True,
            detokenize=False,
            logprobs=self.num_code_groups - 1,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=self._interval(),
            extra_args=piece.to_extra_args(),
        )

    async def _pieces(
        self, job: TalkerJob, key: str, more_text: TextStream, ended: Sequence[str]
    ) -> AsyncGenerator[StreamingInput, None]:
        """The prompt and then the text, each with leave to make the frames whose text is known.

        A frame is drawn once the text of the frame before it is there: with n text ids, n + 1 frames.
        """
        text = list(job.text)
        granted = 0

        def piece(total: int) -> StreamingInput:
            nonlocal granted
            # A piece begins with a stand-in for the last code drawn, which vLLM takes back.
            tokens = [self.stand_in] * (job.prompt_length if granted == 0 else 1)
            parameters = self._parameters(job, key, list(text), total - granted, ended, granted)
            granted = total
            return StreamingInput(prompt=tokens_input(tokens), sampling_params=parameters)

        async for more in more_text:
            check_text(more)
            text += more
            if min(len(text) + 1, job.max_frames - 1) > granted:
                yield piece(min(len(text) + 1, job.max_frames - 1))
        yield piece(job.max_frames)

    def _frames(self, output: RequestOutput, room: int, streaming: bool) -> Frames:
        """The frames in an output of the engine, without the end code's."""
        completion = output.outputs[0]
        flat: Any = completion.logprobs
        tokens = completion.token_ids
        codes = unpack_codes(flat.token_ids if flat else [], self.num_code_groups)
        if completion.finish_reason == "abort":
            raise GenerationCancelled(f"stage {self.stage!r} aborted request {output.request_id}")
        if completion.finish_reason not in (None, "stop", "length"):
            raise GenerationError(
                f"stage {self.stage!r} gave request {output.request_id} up: {completion.finish_reason}"
            )
        if self.end_code in tokens:
            return Frames(codes[: list(tokens).index(self.end_code)], "stop")
        if len(codes) >= room:
            return Frames(codes[:room], "length")
        return Frames(codes, completion.finish_reason if output.finished and not streaming else None)


class _Pace:
    """How long the frames of a stream take, of so many that it does not matter when this process came to read them."""

    WINDOW = 16

    def __init__(self) -> None:
        self._begin, self._frames = 0.0, 0

    def note(self, frames: int) -> float:
        """Take note of frames that have come. Returns seconds a frame once in a while, else 0."""
        now = time.perf_counter()
        self._frames += frames
        if self._begin and self._frames < self.WINDOW:
            return 0.0
        seconds = (now - self._begin) / self._frames if self._begin else 0.0
        self._begin, self._frames = now, 0
        return seconds


def engine_arguments(resolved: Resolved, config: StageConfig, num_code_groups: int) -> dict[str, Any]:
    """The engine arguments of a resolved talker stage: what was configured, and what the core fixes."""
    assert isinstance(config.stage, TalkerStage)
    configured = {name: s.value for name, s in config.engine.items() if s.source != VLLM_DEFAULT}
    return {
        **configured,
        "model": str(resolved.checkpoint.local_path()),
        "served_model_name": configured.get("served_model_name") or [resolved.model],
        "hf_overrides": load_reference(config.stage.config),
        "skip_tokenizer_init": True,
        "enable_prompt_embeds": True,  # so that the model state makes the inputs
        "enable_prefix_caching": False,  # what a frame's code stands for is not in its token alone
        "max_logprobs": max(20, num_code_groups),
        "additional_config": {
            JOB_KEY: {"capture": resolved.platform.capture, "sample_codes": resolved.platform.sample_codes}
        },
    }
