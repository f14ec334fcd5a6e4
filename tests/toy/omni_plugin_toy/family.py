"""The toy family's pipeline and request; its fields make requests slow or faulty on demand."""

from typing import Annotated

from pydantic import Field

from omni_core.images import InputImage
from omni_core.pipeline import DiffusionStage, Pipeline
from omni_core.requests import FrameGrid, VideoRequest


class ToyRequest(VideoRequest):
    width: int = Field(default=32, ge=16, le=512, multiple_of=16)
    height: int = Field(default=32, ge=16, le=512, multiple_of=16)
    num_frames: Annotated[int, FrameGrid(4)] = Field(default=5, ge=1, le=81)
    fps: int = Field(default=8, ge=1, le=60)
    num_inference_steps: int = Field(default=4, ge=1, le=1000)
    group: str = Field(default="a", description="Requests of different groups do not share a forward.")
    fail_in: str = Field(
        default="", description="start, prepare, predict, advance, decode; 'rank 1': predict, there alone."
    )
    fail_at: int = Field(default=0, ge=0)
    step_seconds: float = Field(default=0.0, ge=0, le=10)
    image: InputImage | None = Field(default=None, description="Its mean colour is added to every frame.")
    pieces: int = Field(default=0, ge=0, le=100, description="Into how many its preparation is split.")
    chunk_seconds: float = Field(default=0.0, ge=0, le=10)


def pipeline(checkpoint):
    return Pipeline((DiffusionStage(name="diffusion", model="omni_plugin_toy.model:ToyModel", options={"gain": 0.5}),))


def request(checkpoint):
    return ToyRequest
