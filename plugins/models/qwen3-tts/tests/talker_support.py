"""A talker stage for tests: the engine on the CPU, requests of it, and the golden requests as jobs."""

from __future__ import annotations

import asyncio
import os
import uuid

import numpy as np

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

FRAMES = 24
ARGUMENTS = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "disable_log_stats": True,
}


class RunningTalker:
    """A ``TalkerEngine`` with a loop of its own.

    Args:
        folder: the checkpoint.
        arguments: vLLM's, beside ``ARGUMENTS``.
    """

    def __init__(self, folder, **arguments):
        from omni_core.config.startup import check_versions

        check_versions(allow_version_mismatch=False)  # before vLLM is imported
        from omni_core.vllm.ar.engine import TalkerEngine
        from omni_core.vllm.arguments import resolve_for_api
        from omni_plugin_qwen3_tts.family import speech

        self.folder = folder
        self.environment = dict(os.environ)
        resolved = resolve_for_api(
            str(folder), deploy=None, overrides={}, allow_version_mismatch=False, engine={**ARGUMENTS, **arguments}
        )
        model = speech(resolved.checkpoint)
        self.config = model.config
        self.loop = asyncio.new_event_loop()
        self.engine = self.run(self._start(TalkerEngine, resolved, resolved.stage, model))

    async def _start(self, cls, *arguments):
        return cls(*arguments)

    def run(self, work, seconds=240):
        """The result of a coroutine."""
        return self.loop.run_until_complete(asyncio.wait_for(work, seconds))

    async def speak(self, job, text=None, pause=0.0):
        """Codes int32 [frames, groups] and the finish reason of a job, with ``text`` in the given pieces.

        The codes are read ``pause`` seconds apart.
        """

        async def pieces():
            for piece in text:
                await asyncio.sleep(0.01)
                yield piece

        frames = []
        async for some in self.engine.generate(job, f"test-{uuid.uuid4().hex}", None if text is None else pieces()):
            frames.append(some)
            await asyncio.sleep(pause)
        assert [one.finish_reason for one in frames[:-1]] == [None] * (len(frames) - 1)
        return np.concatenate([one.codes for one in frames]), frames[-1].finish_reason

    def speak_all(self, jobs):
        """``speak`` of all jobs at once."""

        async def work():
            return await asyncio.gather(*(self.speak(job) for job in jobs))

        return self.run(work())

    def close(self):
        """Stop it."""
        self.run(asyncio.to_thread(self.engine.close))
        self.loop.close()
        os.environ.clear()
        os.environ.update(self.environment)


def golden_prompt(config, case, tensors):
    """The prompt of a golden request."""
    from omni_plugin_qwen3_tts.prompt import Voice, build_prompt

    voice = None
    if "speaker_embedding" in tensors:
        codes = tensors["ref_codes"].numpy() if "ref_codes" in tensors else None
        voice = Voice(tensors["speaker_embedding"].numpy(), codes, case["ref_ids"] or ())
    return build_prompt(
        config,
        case["input_ids"],
        instruct_ids=case["instruct_ids"],
        speaker=case.get("speaker"),
        language=case["language"],
        voice=voice,
        whole_text=case["non_streaming_mode"],
    )


def greedy_job(prompt, /, **changes):
    """The job of a prompt as golden files were made."""
    from omni_core.ar.messages import TalkerJob, TokenSampling
    from omni_core.ar.sampling import CodeSampling

    values = {"prompt": prompt.rows, "prompt_length": prompt.length, "text": prompt.text, "seed": 1}
    sampling = {"tokens": TokenSampling(temperature=0.0), "codes": CodeSampling(temperature=0.0)}
    return TalkerJob(**{**values, **sampling, "max_frames": FRAMES, "min_frames": 2, **changes})
