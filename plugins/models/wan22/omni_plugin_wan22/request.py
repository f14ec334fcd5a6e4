"""What a client may ask of a Wan checkpoint: fields, ranges and defaults, as far as they follow from the checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, create_model, field_validator
from pydantic_core import PydanticCustomError

from omni_core.checkpoint import Checkpoint
from omni_core.requests import FrameGrid, Prompt, VideoRequest
from omni_plugin_wan22.family import WanLayout, read_layout

MAX_SIDE = 2048
MAX_AREA = 1920 * 1088
MAX_FRAMES = 241
MAX_PROMPT = 5000
MAX_TOKENS = 512
"""Text tokens that Wan was trained with."""


class WanRequest(VideoRequest):
    """A request to a checkpoint with one expert (Wan 2.1).

    Number of steps and guidance default to those of diffusers' ``WanPipeline``, the frame rate to Wan's own.
    """

    prompt: Prompt = Field(max_length=MAX_PROMPT, description="What to show. Text beyond max_sequence_length is cut.")
    fps: int = Field(16, ge=1, le=120, description="Frames per second of the written file; Wan was trained at 16.")
    num_inference_steps: int = Field(50, ge=1, le=1000, description="Number of denoising steps.")
    guidance_scale: float = Field(
        5.0, ge=0, le=50, description="Weight of the prompt over the negative prompt; none of it at 1 or less."
    )
    negative_prompt: str = Field("", max_length=MAX_PROMPT, description="What to avoid; needs guidance_scale above 1.")
    flow_shift: float = Field(3.0, ge=0.1, le=100, description="Higher spends more steps on high noise.")
    max_sequence_length: int = Field(MAX_TOKENS, ge=1, le=MAX_TOKENS, description="Tokens of text; the rest is cut.")

    @property
    def guidance(self) -> tuple[float, float]:
        """Guidance scale of the high-noise and of the low-noise expert."""
        return self.guidance_scale, self.guidance_scale

    @property
    def expert_boundary(self) -> float | None:
        """Share of the training timesteps below which the low-noise expert works; ``None`` with one expert."""
        return None

    @field_validator("height")
    @classmethod
    def _area_is_limited(cls, height: int, info: ValidationInfo) -> int:
        width = info.data.get("width", 0)
        if width * height > MAX_AREA:
            raise PydanticCustomError(
                "area",
                "width x height must be at most {limit} pixels, {width}x{height} has {area}",
                {"limit": MAX_AREA, "width": width, "height": height, "area": width * height},
            )
        return height

    @field_validator("negative_prompt")
    @classmethod
    def _negative_prompt_has_effect(cls, text: str, info: ValidationInfo) -> str:
        if text:
            _needs_guidance(info)
        return text


class WanTwoExpertRequest(WanRequest):
    """A request to a checkpoint with a high-noise and a low-noise expert (Wan 2.2 A14B).

    Steps and guidance default to the values of Wan2.2's own configuration (``wan/configs/wan_t2v_A14B.py``:
    ``sample_steps`` and the high-noise part of ``sample_guide_scale``, whose low-noise part is 3.0).
    """

    num_inference_steps: int = Field(40, ge=1, le=1000, description="Number of denoising steps.")
    guidance_scale: float = Field(
        4.0, ge=0, le=50, description="Weight of the prompt over the negative prompt; none of it at 1 or less."
    )
    guidance_scale_2: float | None = Field(
        None,
        ge=0,
        le=50,
        description="The same for the low-noise expert; guidance_scale where absent, and needs it above 1.",
    )
    boundary_ratio: float = Field(
        0.875, ge=0, le=1, description="Share of the noise levels below which the low-noise expert takes over."
    )

    @property
    def guidance(self) -> tuple[float, float]:
        low = self.guidance_scale if self.guidance_scale_2 is None else self.guidance_scale_2
        return self.guidance_scale, low

    @property
    def expert_boundary(self) -> float | None:
        return self.boundary_ratio

    @field_validator("guidance_scale_2")
    @classmethod
    def _second_scale_has_effect(cls, scale: float | None, info: ValidationInfo) -> float | None:
        if scale is not None:
            _needs_guidance(info)
        return scale


def request(checkpoint: Checkpoint) -> type[VideoRequest]:
    """The request model of ``checkpoint``; raises what ``omni_plugin_wan22.family.pipeline`` raises."""
    layout = read_layout(checkpoint)
    base = WanRequest if layout.boundary_ratio is None else WanTwoExpertRequest
    return create_model(base.__name__, __base__=base, __module__=__name__, **_fields(layout))


def _fields(layout: WanLayout) -> dict[str, Any]:
    """The fields whose range or default the checkpoint decides."""
    patch_frames, patch_rows, patch_columns = layout.patch_size
    frame_step = layout.temporal_scale * patch_frames
    max_frames = min(MAX_FRAMES, layout.temporal_scale * (layout.max_positions * patch_frames - 1) + 1)
    fields: dict[str, Any] = {
        "width": _side("Width", 832, layout.spatial_scale * patch_columns, layout.max_positions),
        "height": _side("Height", 480, layout.spatial_scale * patch_rows, layout.max_positions),
        "num_frames": (
            Annotated[int, FrameGrid(frame_step)],
            Field(min(81, max_frames), ge=1, le=max_frames, description="Number of frames."),
        ),
        "flow_shift": (
            float,
            Field(layout.flow_shift, ge=0.1, le=100, description="Higher spends more steps on high noise."),
        ),
    }
    if layout.boundary_ratio is not None:
        description = "Share of the noise levels below which the low-noise expert takes over."
        fields["boundary_ratio"] = (float, Field(layout.boundary_ratio, ge=0, le=1, description=description))
    return fields


def _side(name: str, default: int, grid: int, max_positions: int) -> tuple[Any, Any]:
    largest = min(MAX_SIDE // grid, max_positions) * grid
    field = Field(min(default, largest), ge=grid, le=largest, multiple_of=grid, description=f"{name} in pixels.")
    return int, field


def _needs_guidance(info: ValidationInfo) -> None:
    scale = info.data.get("guidance_scale")
    if scale is not None and scale <= 1:
        raise PydanticCustomError(
            "guidance", "has no effect without guidance: guidance_scale is {scale}, not above 1", {"scale": scale}
        )
