"""Wan through the whole engine on a CUDA device, against diffusers on the same device."""

import asyncio
from importlib.util import find_spec

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.serve,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SIZE = {"height": 64, "width": 96, "num_frames": 9}
CASES = [
    {"prompt": "a cat runs", "seed": 1, "num_inference_steps": 10, "guidance_scale": 4.0},
    {"prompt": "a red car", "seed": 2, "num_inference_steps": 7, "guidance_scale": 3.0, "guidance_scale_2": 2.0},
    {"prompt": "a dog", "seed": 3, "num_inference_steps": 8, "guidance_scale": 1.0},
]


def reference(dtype, head_dim, prompt, *, seed, **fields):
    from omni_plugin_wan22.checkpoints import build_pipeline

    pipeline = build_pipeline(head_dim=head_dim)
    pipeline.text_encoder.to("cuda", dtype)
    pipeline.vae.to("cuda")
    for transformer in (pipeline.transformer, pipeline.transformer_2):
        transformer.to("cuda", dtype)
        for name, parameter in transformer.named_parameters():
            if any(kept in name for kept in transformer._keep_in_fp32_modules):
                parameter.data = parameter.data.float()
    generator = torch.Generator().manual_seed(seed)
    return pipeline(prompt, generator=generator, output_type="np", **SIZE, **fields).frames[0]


def run(folder, **engine):
    from omni_core import Omni

    with Omni(folder, max_num_seqs=4, gpu_memory_utilization=0.1, **engine) as omni:
        alone = [omni.generate(**case, **SIZE, frame_type="float32").frames.copy() for case in CASES]
        batched = omni.generate_many([{**case, **SIZE} for case in CASES], frame_type="float32")
        stats = omni._run(omni._omni.engine.client.stats())
        dropped = omni._run(_abort(omni._omni.engine))
        return alone, [output.frames.copy() for output in batched], stats, dropped


async def _abort(engine):
    request = engine.parse({**CASES[0], **SIZE, "num_inference_steps": 1000})
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0.3)
    return (await engine.client.stats())["running"]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "engine", "tolerance"),
    [
        ("float32", 12, {"distributed_executor_backend": "uni"}, 1e-3),
        ("float32", 12, {"distributed_executor_backend": "mp"}, 1e-3),
        ("float32", 12, {"distributed_executor_backend": "mp", "async_scheduling": False}, 1e-3),
        pytest.param(
            "float32",
            12,
            {"distributed_executor_backend": "ray"},
            1e-3,
            marks=pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
        ),
        ("bfloat16", 64, {"distributed_executor_backend": "uni"}, None),
        ("bfloat16", 64, {"distributed_executor_backend": "uni", "attention_backend": "flash-attention"}, None),
        ("bfloat16", 64, {"enforce_eager": False}, None),
        pytest.param("float32", 12, {"tensor_parallel_size": 2}, 1e-3, marks=TWO_DEVICES),
        pytest.param("bfloat16", 64, {"tensor_parallel_size": 2}, None, marks=TWO_DEVICES),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_the_engine_gives_what_diffusers_gives(tmp_path, dtype, head_dim, engine, tolerance):
    from omni_plugin_wan22.checkpoints import write_checkpoint

    write_checkpoint(tmp_path / "checkpoint", head_dim=head_dim)
    overrides = {f"diffusion.{name}": value for name, value in engine.items() if name == "attention_backend"}
    engine = {name: value for name, value in engine.items() if name != "attention_backend"}
    alone, batched, stats, running = run(tmp_path / "checkpoint", dtype=dtype, overrides=overrides, **engine)
    exact = [reference(torch.float32, head_dim, **case) for case in CASES]
    assert running == 0, "the aborted request is gone"
    assert any(int(size) > 1 for size in stats["forwards"]), stats
    for case, one, many, expected in zip(CASES, alone, batched, exact, strict=True):
        error, beside = np.abs(one - expected).mean(), np.abs(many - one).mean()
        # Random weights amplify rounding: diffusers' own error in this dtype is the measure.
        diffusers = np.abs(reference(getattr(torch, dtype), head_dim, **case) - expected).mean()
        allowed = tolerance or 2 * diffusers + 1e-3
        print(
            f"{dtype}: mean error {error:.1e}, batched {beside:.1e}, diffusers {diffusers:.1e}, allowed {allowed:.1e}"
        )
        assert error <= allowed and beside <= allowed
