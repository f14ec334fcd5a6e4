"""The pipeline of a noise checkpoint, and what clients may ask of it."""

from pydantic import Field

from omni_core.pipeline import DiffusionStage, Pipeline
from omni_core.requests import VideoRequest


class NoiseRequest(VideoRequest):
    width: int = Field(64, ge=16, le=512, multiple_of=16, description="Width in pixels.")
    height: int = Field(64, ge=16, le=512, multiple_of=16, description="Height in pixels.")
    num_frames: int = Field(16, ge=1, le=240, description="Number of frames.")
    fps: int = Field(8, ge=1, le=60, description="Frames per second of the written file.")
    num_inference_steps: int = Field(10, ge=1, le=100, description="Number of denoising steps.")


def pipeline(checkpoint):
    return Pipeline((DiffusionStage("diffusion", "omni_plugin_noise.model:NoiseModel", options={"strength": 0.5}),))


def request(checkpoint):
    return NoiseRequest
