"""A served model on two ranks: the same video as on one, and failures that end a request on both."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from omni_core.errors import GenerationError

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, one for each rank"),
]

SIZE = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 6, "seed": 5}


RANK_TIMEOUT = 2.0


def one_core_each():
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[1]}"


@pytest.fixture(scope="module")
def two_ranks(wan_checkpoint):
    from omni_core import Omni

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", one_core_each())
        with Omni(wan_checkpoint, tensor_parallel_size=2) as omni:
            yield omni


def test_two_ranks_give_what_diffusers_gives(two_ranks):
    import torch

    from omni_plugin_wan22.checkpoints import build_pipeline

    fields = {**SIZE}
    generator = torch.Generator().manual_seed(fields.pop("seed"))
    pipeline = build_pipeline()
    expected = pipeline("a cat", generator=generator, output_type="np", guidance_scale=4.0, **fields).frames[0]
    output = two_ranks.generate("a cat", guidance_scale=4.0, frame_type="float32", **SIZE)
    assert np.abs(output.frames - expected).max() <= 1e-5
    batched = two_ranks.generate_many(
        [{"prompt": "a cat", "guidance_scale": 4.0, **SIZE}, {"prompt": "a dog", **SIZE}], frame_type="float32"
    )
    assert np.abs(batched[0].frames - expected).max() <= 1e-5


def test_what_fails_on_both_ranks_fails_alone(two_ranks, monkeypatch):
    """A result that does not fit fails on the rank that writes it; the other rank has nothing to write."""
    monkeypatch.setattr(two_ranks._omni.engine, "parse", lambda values, strict=True: _unparsed(two_ranks, values))
    with pytest.raises(GenerationError, match="encode failed: RequestError"):
        two_ranks.generate("a cat", **{**SIZE, "height": 40})
    monkeypatch.undo()
    assert two_ranks.generate("a cat", **SIZE).frames.shape == (9, 32, 48, 3)


def _unparsed(omni, values):
    """A request that skipped validation, as no client can send it."""
    model = omni._omni.engine.request_model
    defaults = {name: info.default for name, info in model.model_fields.items() if not info.is_required()}
    return model.model_construct(**{**defaults, **values})


@pytest.mark.parametrize("ahead", ["--no-async-scheduling", "--async-scheduling"])
def test_a_rank_that_fails_alone_ends_the_engine_and_the_stage_is_started_again(
    start_server, toy_site, toy_checkpoint, ahead
):
    """Given two ranks of which one fails while the other waits for it, nobody waits longer than the limit."""
    server = start_server(
        str(Path(sys.executable).parent / "omni"), "serve", str(toy_checkpoint), "--tensor-parallel-size", "2", ahead,
        env={
            "PYTHONPATH": os.pathsep.join([*toy_site, os.environ.get("PYTHONPATH", "")]),
            "VLLM_CPU_OMP_THREADS_BIND": one_core_each(),
            "TOY_RANK_TIMEOUT": str(RANK_TIMEOUT),
        },
    )  # fmt: skip

    def post(**fields):
        return server.http.post("/v1/videos/sync", json={"prompt": "a cat", **fields})

    everywhere = post(fail_in="predict", fail_at=1)
    assert everywhere.status_code == 500 and "asked to fail in predict" in everywhere.json()["error"]["message"]
    assert server.http.get("/health").json()["stages"]["diffusion"]["restarts"] == 0, "what fails on both fails alone"

    with ThreadPoolExecutor(1) as clients:
        other = clients.submit(post, num_inference_steps=1000, step_seconds=0.02)
        time.sleep(1)
        begin = time.monotonic()
        alone = post(fail_in="rank 1", fail_at=1)
        took = time.monotonic() - begin
        answers = [alone, other.result()]
    for answer in answers:
        assert answer.status_code == 500 and "stage 'diffusion' died" in answer.json()["error"]["message"], answer.text
    assert RANK_TIMEOUT <= took < RANK_TIMEOUT + 15
    while server.http.get("/health").status_code != 200:
        assert time.monotonic() - begin < 150, "the stage is started again"
        time.sleep(0.2)
    assert post().status_code == 200
    assert server.http.get("/health").json()["stages"]["diffusion"]["restarts"] == 1
    assert "rank 1 failed alone in denoise" in server.log.read_text()
    server.stop()
