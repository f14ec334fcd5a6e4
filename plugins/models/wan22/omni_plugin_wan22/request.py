"""What a client may ask of a Wan checkpoint: fields, ranges and defaults, as far as they follow from the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator
from pydantic_core import PydanticCustomError

from omni_core.checkpoint import Checkpoint
from omni_core.images import InputImage
from omni_core.requests import FrameGrid, Prompt, VideoRequest
from omni_plugin_wan22.family import Conditioning, WanLayout, read_layout

MAX_SIDE = 2048
MAX_AREA = 1920 * 1088
MAX_FRAMES = 241
MAX_PROMPT = 5000
MAX_TOKENS = 512
"""Text tokens that Wan was trained with."""
FEW_STEPS = 3

Solver = Literal["unipc", "euler"]


class WanRequest(VideoRequest):
    """What every request to Wan has; alone it is one to a checkpoint distilled to few steps without guidance."""

    prompt: Prompt = Field(max_length=MAX_PROMPT, description="What to show. Text beyond max_sequence_length is cut.")
    num_inference_steps: int = Field(
        FEW_STEPS, ge=FEW_STEPS, le=FEW_STEPS, description="Number of denoising steps, which the checkpoint fixes."
    )
    max_sequence_length: int = Field(MAX_TOKENS, ge=1, le=MAX_TOKENS, description="Tokens of text; the rest is cut.")

    @property
    def images(self) -> tuple[InputImage | None, InputImage | None]:
        """First and last frame, where the checkpoint takes them and the request has them."""
        return getattr(self, "image", None), getattr(self, "last_image", None)

    @property
    def unwanted(self) -> tuple[str, ...]:
        """What guidance leads away from: one text, or none without guidance."""
        return ()

    @property
    def guidance(self) -> tuple[float, float]:
        """Guidance scale of the high-noise and of the low-noise expert."""
        return 1.0, 1.0

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

    @field_validator("last_image", check_fields=False)
    @classmethod
    def _last_frame_is_not_the_first(cls, image: InputImage | None, info: ValidationInfo) -> InputImage | None:
        if image is not None and info.data.get("num_frames") == 1:
            raise PydanticCustomError("last_image", "needs more than one frame: num_frames is 1")
        return image


class WanGuidedRequest(WanRequest):
    """A request to a checkpoint with one expert and classifier-free guidance."""

    num_inference_steps: int = Field(50, ge=1, le=1000, description="Number of denoising steps.")
    guidance_scale: float = Field(
        5.0, ge=0, le=50, description="Weight of the prompt over the negative prompt; none of it at 1 or less."
    )
    negative_prompt: str = Field("", max_length=MAX_PROMPT, description="What to avoid; needs guidance_scale above 1.")
    sample_solver: Solver = Field("unipc", description="How a step follows the predicted velocity.")
    flow_shift: float = Field(3.0, ge=0.1, le=100, description="Higher spends more steps on high noise.")

    @property
    def unwanted(self) -> tuple[str, ...]:
        return (self.negative_prompt,) if self.guidance_scale > 1.0 else ()

    @property
    def guidance(self) -> tuple[float, float]:
        return self.guidance_scale, self.guidance_scale

    @field_validator("negative_prompt")
    @classmethod
    def _negative_prompt_has_effect(cls, text: str, info: ValidationInfo) -> str:
        if text:
            _needs_guidance(info)
        return text


class WanTwoExpertRequest(WanGuidedRequest):
    """A request to a checkpoint with a high-noise and a low-noise expert (Wan 2.2 A14B)."""

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


@dataclass(frozen=True)
class _Defaults:
    """What a checkpoint of some kind was made for."""

    width: int = 832
    height: int = 480
    num_frames: int = 81
    fps: int = 16
    steps: int = 50
    guidance: float = 5.0


WAN_21 = _Defaults()
"""Size, steps and guidance of diffusers' ``WanPipeline``, Wan's own frame rate."""
T2V_A14B = _Defaults(steps=40, guidance=4.0)
"""``wan/configs/wan_t2v_A14B.py`` of Wan2.2: ``sample_steps``, high-noise part of ``sample_guide_scale`` (low: 3.0)."""
I2V_A14B = _Defaults(steps=40, guidance=3.5)
"""``wan/configs/wan_i2v_A14B.py`` of Wan2.2."""
TI2V_5B = _Defaults(width=1280, height=704, num_frames=121, fps=24)
"""``wan/configs/wan_ti2v_5B.py`` of Wan2.2."""


def request(checkpoint: Checkpoint) -> type[VideoRequest]:
    """The request model of ``checkpoint``; raises what ``omni_plugin_wan22.family.pipeline`` raises."""
    layout = read_layout(checkpoint)
    base: type[WanRequest] = WanGuidedRequest if layout.boundary_ratio is None else WanTwoExpertRequest
    if layout.few_steps:
        base = WanRequest
    fields = _sizes(layout) | _guidance(layout) | _images(layout)
    return create_model(base.__name__, __base__=base, __module__=__name__, **fields)


def _defaults(layout: WanLayout) -> _Defaults:
    if layout.spatial_scale == 16:  # the VAE of TI2V-5B alone
        return TI2V_5B
    if layout.conditioning == Conditioning.CHANNELS:
        return I2V_A14B
    return WAN_21 if layout.boundary_ratio is None and layout.experts == ("transformer",) else T2V_A14B


def _sizes(layout: WanLayout) -> dict[str, Any]:
    defaults = _defaults(layout)
    patch_frames, patch_rows, patch_columns = layout.patch_size
    frame_step = layout.temporal_scale * patch_frames
    max_frames = min(MAX_FRAMES, layout.temporal_scale * (layout.max_positions * patch_frames - 1) + 1)
    fps = f"Frames per second of the written file; Wan was trained at {defaults.fps}."
    return {
        "width": _side("Width", defaults.width, layout.spatial_scale * patch_columns, layout.max_positions),
        "height": _side("Height", defaults.height, layout.spatial_scale * patch_rows, layout.max_positions),
        "num_frames": (
            Annotated[int, FrameGrid(frame_step)],
            Field(min(defaults.num_frames, max_frames), ge=1, le=max_frames, description="Number of frames."),
        ),
        "fps": (int, Field(defaults.fps, ge=1, le=120, description=fps)),
    }


def _guidance(layout: WanLayout) -> dict[str, Any]:
    """Defaults of schedule and guidance; a checkpoint of few steps has neither."""
    if layout.few_steps:
        return {}
    defaults = _defaults(layout)
    base = WanGuidedRequest if layout.boundary_ratio is None else WanTwoExpertRequest
    values: dict[str, Any] = {
        "num_inference_steps": defaults.steps,
        "guidance_scale": defaults.guidance,
        "sample_solver": layout.solver,
        "flow_shift": layout.flow_shift,
    }
    if layout.boundary_ratio is not None:
        values["boundary_ratio"] = layout.boundary_ratio
    return {name: _with_default(base, name, value) for name, value in values.items()}


def _images(layout: WanLayout) -> dict[str, Any]:
    if layout.conditioning == Conditioning.TEXT:
        return {}
    first = "The first frame; resized to width x height, whatever its shape."
    optional = InputImage | None
    fields: dict[str, Any] = {
        "image": (InputImage, Field(description=first))
        if layout.image_required
        else (optional, Field(None, description=f"{first} Text to video without it."))
    }
    if layout.conditioning == Conditioning.CHANNELS:
        fields["last_image"] = (optional, Field(None, description="The last frame, resized likewise."))
    return fields


def _with_default(base: type[WanRequest], name: str, default: Any) -> tuple[Any, Any]:
    """A field of ``base`` with another default."""
    field = base.model_fields[name]
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return annotation, Field(default, description=field.description)


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
