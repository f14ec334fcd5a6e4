"""What the tests of this plugin share: a driver that stands in for the runtime, and the reference pipeline."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image

TOLERANCE = 1e-5
"""Float32 on CPU, videos in [0, 1]. Measured: 4e-6 at most (TI2V 5B; 5e-7 the others)."""
FAR = 1000 * TOLERANCE
"""What a mistake must change at least, so that the tolerance means something. Measured: 0.04 at least."""

BASE = {
    "prompt": "A cat & a dog run in the snow",
    "negative_prompt": "blurry",
    "width": 48,
    "height": 32,
    "num_frames": 9,
    "num_inference_steps": 8,
    "guidance_scale": 4.0,
    "seed": 7,
    "max_sequence_length": 64,
}
ONE_EXPERT = BASE
TWO_EXPERTS = {**BASE, "guidance_scale_2": 3.0}
TI2V = {**BASE, "width": 96, "height": 64}


def picture(seed: int, width: int = 70, height: int = 50) -> Image.Image:
    """A picture of coloured blocks, another for each seed; its size fits no grid."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


NOT_DIFFUSERS = ("seed", "fps", "boundary_ratio", "flow_shift", "sample_solver")
"""Fields that are no arguments of a diffusers pipeline: they are set in other ways."""


def define_torchvision_operators() -> torch.library.Library | None:
    """A torchvision built for CUDA has no operators beside a torch built for CPU, and cannot be imported without."""
    if torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """The attention that the tests hand to the model."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2)


def generate(model: Any, request: Any) -> np.ndarray:
    """One request, alone: float32 [frames, height, width, 3]."""
    return generate_together(model, [(0, request)])[0][0]


def generate_together(
    model: Any, arrivals: Sequence[tuple[int, Any]], dropped_after: Mapping[int, int] | None = None
) -> tuple[dict[int, np.ndarray], list[int]]:
    """Requests that arrive at given rounds and share forwards where the model allows it, as the runtime runs them.

    ``dropped_after`` takes request ``i`` away once it has made so many steps. Returns videos by position, and the
    size of every batch.
    """
    dropped_after = dropped_after or {}
    waiting = dict(enumerate(arrivals))
    running: dict[int, Any] = {}
    videos: dict[int, np.ndarray] = {}
    sizes: list[int] = []
    round_number = 0
    with torch.inference_mode():
        while waiting or running:
            for i in [i for i, (arrival, _) in waiting.items() if arrival <= round_number]:
                running[i] = model.begin(waiting.pop(i)[1])
            groups = defaultdict(list)
            for i, state in running.items():
                groups[model.batch_key(state)].append(i)
            for members in groups.values():
                sizes.append(len(members))
                for i, prediction in zip(members, model.predict([running[i] for i in members]), strict=True):
                    model.advance(running[i], prediction)
                    running[i].step += 1
            for i, state in list(running.items()):
                if state.step == state.num_steps:
                    videos[i] = torch.cat(list(model.decode(running.pop(i)))).numpy()
                elif state.step == dropped_after.get(i):
                    running.pop(i)
            round_number += 1
    return videos, sizes


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two videos."""
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return float(np.abs(a - b).max())


def image_pipeline(pipeline: Any) -> Any:
    """A ``WanPipeline`` of TI2V-5B as the pipeline that diffusers has for its image to video."""
    from diffusers import WanImageToVideoPipeline

    made = WanImageToVideoPipeline(**pipeline.components, expand_timesteps=True)
    made.set_progress_bar_config(disable=True)
    return made


def reference_video(pipeline: Any, values: Mapping[str, Any]) -> np.ndarray:
    """What diffusers' pipeline makes of the same fields."""
    arguments = {k: v for k, v in values.items() if k not in NOT_DIFFUSERS}
    if "boundary_ratio" in values:
        pipeline.register_to_config(boundary_ratio=values["boundary_ratio"])
    if "flow_shift" in values:
        shift = {"flow_shift": values["flow_shift"], "shift": values["flow_shift"]}
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **shift)
    generator = torch.Generator("cpu").manual_seed(values["seed"])
    return pipeline(generator=generator, output_type="np", **arguments).frames[0]


def perturbed(pipeline: Any, change: Callable[[Any], None]) -> Any:
    """The pipeline after ``change`` has damaged it; build a fresh one for each."""
    with torch.no_grad():
        change(pipeline)
    return pipeline
