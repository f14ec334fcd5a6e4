"""Wan through the whole engine against diffusers' ``WanPipeline``: alone, and batched with staggered others."""

import asyncio

import numpy as np
import pytest
import torch

from omni_core.errors import ConfigError, RequestError, StageStartError

pytestmark = pytest.mark.serve

TOLERANCE = 1e-5
SIZE = {"height": 32, "width": 48, "num_frames": 9}
REQUESTS = {
    "first": {"prompt": "a cat runs in the snow", "seed": 11, "num_inference_steps": 12, "guidance_scale": 4.0},
    "second": {
        "prompt": "a red car",
        "negative_prompt": "blurry, bad quality",
        "seed": 22,
        "num_inference_steps": 9,
        "guidance_scale": 3.0,
        "guidance_scale_2": 2.0,
    },
    "third": {"prompt": "a dog", "seed": 33, "num_inference_steps": 10, "guidance_scale": 1.0},
}


@pytest.fixture(scope="module")
def reference():
    """What diffusers gives for a request: float32 [frames, height, width, 3] in [0, 1]."""
    from omni_plugin_wan22.checkpoints import build_pipeline

    def run(prompt, *, seed, **fields):
        # A fresh pipeline each time: diffusers keeps the schedule of the last call.
        pipeline = build_pipeline()
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(seed)
        return pipeline(prompt, generator=generator, output_type="np", **SIZE, **fields).frames[0]

    return run


@pytest.fixture(scope="module")
def omni(wan_checkpoint):
    from omni_core import Omni

    with Omni(wan_checkpoint, max_num_seqs=4) as omni:
        yield omni


def difference(output, expected):
    return float(np.abs(output.frames - expected).max())


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_alone_gives_what_diffusers_gives(omni, reference, name):
    output = omni.generate(**REQUESTS[name], **SIZE, frame_type="float32")
    assert difference(output, reference(**REQUESTS[name])) <= TOLERANCE


def test_staggered_requests_batched_with_one_aborted_give_what_diffusers_gives(omni, reference):
    async def work():
        engine, stage = omni._omni.engine, omni._omni.engine.client
        await stage.stats(reset=True)
        long = asyncio.Event()

        def on_progress(progress):
            if progress.step >= 2:
                long.set()

        def start(name, progress=None, **extra):
            request = engine.parse({**REQUESTS[name], **SIZE, **extra})
            return asyncio.create_task(engine.generate(request, frame_type="float32", progress=progress))

        first = start("first", on_progress)
        dropped = start("second", num_inference_steps=200)
        await long.wait()
        second = start("second")
        await asyncio.sleep(0.01)
        third = start("third")
        await asyncio.sleep(0.05)
        dropped.cancel()
        outputs = await asyncio.gather(first, second, third)
        with pytest.raises(asyncio.CancelledError):
            await dropped
        return outputs, await stage.stats()

    outputs, stats = omni._run(work())
    for name, output in zip(REQUESTS, outputs, strict=True):
        assert difference(output, reference(**REQUESTS[name])) <= TOLERANCE, name
    assert sum(count for size, count in stats["forwards"].items() if int(size) > 1) >= 5, stats


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 12},
        {"prompt": "a cat runs in the sand"},
        {"num_inference_steps": 11},
        {"guidance_scale": 4.5},
        {"negative_prompt": "x"},
        {"flow_shift": 5.0},
        {"boundary_ratio": 0.5},
    ],
    ids=str,
)
def test_anything_else_gives_another_video(omni, reference, change):
    output = omni.generate(**{**REQUESTS["first"], **change}, **SIZE, frame_type="float32")
    assert difference(output, reference(**REQUESTS["first"])) > 100 * TOLERANCE


def test_progress_and_frames_of_the_python_api(omni):
    seen = []
    output = omni.generate("a cat", **SIZE, num_inference_steps=8, fps=12, progress=seen.append)
    assert output.frames.shape == (9, 32, 48, 3) and output.frames.dtype == np.uint8
    assert output.fps == 12 and output.request.seed is not None
    assert [p.step for p in seen] == sorted(p.step for p in seen) and seen[-1].num_steps == 8
    again = omni.generate("a cat", **SIZE, num_inference_steps=8, fps=12, seed=output.request.seed)
    np.testing.assert_array_equal(again.frames, output.frames)


def test_many_requests_are_batched_and_come_in_order(omni):
    requests = [{"prompt": f"scene {i}", "seed": i, **SIZE, "num_inference_steps": 4} for i in range(6)]
    outputs = omni.generate_many(requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output.request.prompt == request["prompt"]
    assert len({output.frames.tobytes() for output in outputs}) == 6


@pytest.mark.parametrize(
    "wrong", [{"height": 40}, {"num_frames": 8}, {"nonsense": 1}, {"seed": "7"}, {"n": 2}], ids=str
)
def test_the_python_api_validates_as_http_does(omni, wrong):
    with pytest.raises(RequestError) as caught:
        omni.generate("a cat", **{**SIZE, **wrong})
    assert caught.value.param == next(iter(wrong))


def test_the_python_api_resolves_as_the_command_line_does(wan_checkpoint):
    from omni_core import Omni

    with pytest.raises(ConfigError, match="tensor_paralel_size"):
        Omni(wan_checkpoint, tensor_paralel_size=2)
    with pytest.raises(ConfigError):
        Omni(wan_checkpoint, overrides={"nostage.dtype": "float32"})


def test_a_stage_that_cannot_start_says_why_in_one_line(wan_checkpoint):
    from omni_core import Omni

    with pytest.raises(StageStartError, match=r"stage 'diffusion' cannot start: Wan runs in .* not float16"):
        Omni(wan_checkpoint, dtype="float16")


def test_the_video_over_http_has_the_size_frames_and_rate_asked_for(wan_server, reference):
    import io

    from omni_core.media import decode_video

    body = {**REQUESTS["second"], "size": "48x32", "num_frames": 9, "fps": 12, "model": "wan"}
    answer = wan_server.http.post("/v1/videos/sync", json=body)
    assert answer.status_code == 200, answer.text
    frames, fps = decode_video(io.BytesIO(answer.content))
    assert frames.shape == (9, 32, 48, 3) and fps == 12
    expected = reference(**REQUESTS["second"])
    assert np.abs(frames / 255 - expected).mean() < 0.1, "H.264 of noise is lossy, but this is the video"


def test_health_and_models(wan_server):
    assert wan_server.http.get("/health").status_code == 200
    assert [model["id"] for model in wan_server.http.get("/v1/models").json()["data"]] == ["wan"]
