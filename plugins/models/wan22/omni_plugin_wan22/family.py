"""Which Wan checkpoints can be served, and how: the checkpoint's own configuration decides. Import-light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError, UnsupportedCheckpoint
from omni_core.pipeline import DiffusionStage, Pipeline

TEXT_TO_VIDEO, IMAGE_TO_VIDEO, FEW_STEPS = PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "WanDMDPipeline")
"""What ``_class_name`` of ``model_index.json`` may be: diffusers' two, and FastVideo's for distilled checkpoints."""

SOLVERS = {"UniPCMultistepScheduler": "unipc", "FlowMatchEulerDiscreteScheduler": "euler"}
UNUSUAL = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_dynamic_shifting",
    "shift_terminal",
    "invert_sigmas",
    "stochastic_sampling",
)
VAE_DTYPE = "float32"
"""Of the stage's option ``vae_dtype``, where nobody sets it; diffusers' examples run the VAE in float32 too."""
CLIP_CONDITIONED = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")


class Conditioning(StrEnum):
    """What the network can be given beside text."""

    TEXT = "text"
    FIRST_FRAME = "first-frame"
    """The first latent frame, at a timestep of its own (Wan2.2 TI2V-5B)."""
    CHANNELS = "channels"
    """Any frames, through channels of their own (Wan2.2 I2V A14B)."""


@dataclass(frozen=True)
class WanLayout:
    """A checkpoint in diffusers' layout that this plugin can serve.

    Attributes:
        transformer: configuration of the experts; two have the same shape.
        vae: configuration of ``vae``.
        scheduler: configuration of ``scheduler``.
        experts: the folders of the experts, high noise first.
        boundary_ratio: below this share of the training timesteps the second expert takes over; ``None`` with one.
        conditioning: what the network can be given beside text.
        image_required: whether a request must bring an image.
        few_steps: distilled to the few steps of ``schedule.DMDSampler``, without guidance.
    """

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    experts: tuple[str, ...]
    boundary_ratio: float | None
    conditioning: Conditioning
    image_required: bool
    few_steps: bool

    @property
    def temporal_scale(self) -> int:
        """Video frames per latent frame, beyond the first."""
        return int(self.vae.get("scale_factor_temporal", 4))

    @property
    def spatial_scale(self) -> int:
        """Pixels per latent position."""
        return int(self.vae.get("scale_factor_spatial", 8))

    @property
    def patch_size(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns per token."""
        frames, rows, columns = self.transformer.get("patch_size", (1, 2, 2))
        return int(frames), int(rows), int(columns)

    @property
    def max_positions(self) -> int:
        """Tokens along one axis that the rotary embedding was made for."""
        return int(self.transformer.get("rope_max_seq_len", 1024))

    @property
    def solver(self) -> str:
        """``unipc`` or ``euler``: the checkpoint's own."""
        return SOLVERS.get(str(self.scheduler.get("_class_name")), "unipc")

    @property
    def flow_shift(self) -> float:
        return float(self.scheduler.get("shift" if self.solver == "euler" else "flow_shift", 1.0))


def pipeline(checkpoint: Checkpoint) -> Pipeline:
    """One diffusion stage.

    Raises:
        UnsupportedCheckpoint: a Wan checkpoint of a kind that is not served yet.
        CheckpointError: a component is missing.
    """
    read_layout(checkpoint)
    return Pipeline(
        (DiffusionStage(name="diffusion", model="omni_plugin_wan22.model:WanModel", options={"vae_dtype": VAE_DTYPE}),)
    )


def read_layout(checkpoint: Checkpoint) -> WanLayout:
    """The checkpoint's configuration, checked; raises what ``pipeline`` raises."""
    index = checkpoint.read("model_index.json")
    for file in ("text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        _required(checkpoint, file)
    experts = _experts(index)
    conditioning, name = _conditioning(index), index.get("_class_name")
    layout = WanLayout(
        transformer=_required(checkpoint, f"{experts[0]}/config.json"),
        vae=_required(checkpoint, "vae/config.json"),
        scheduler=_required(checkpoint, "scheduler/scheduler_config.json"),
        experts=experts,
        boundary_ratio=index.get("boundary_ratio") if len(experts) == 2 else None,
        conditioning=conditioning,
        image_required=name == IMAGE_TO_VIDEO,
        few_steps=name == FEW_STEPS,
    )
    if reason := _why_not(checkpoint, layout):
        raise UnsupportedCheckpoint(f"{checkpoint}: {reason}")
    return layout


def _experts(index: Mapping[str, Any]) -> tuple[str, ...]:
    """The folders that are needed: at a boundary of 0 or 1 one expert would do all steps, so that one is loaded."""
    boundary = index.get("boundary_ratio")
    if boundary is None or boundary <= 0:
        return ("transformer",)
    return ("transformer_2",) if boundary >= 1 else ("transformer", "transformer_2")


def _conditioning(index: Mapping[str, Any]) -> Conditioning:
    name, per_token = index.get("_class_name"), bool(index.get("expand_timesteps"))
    if name == FEW_STEPS:  # with text alone, all tokens have the same timestep
        return Conditioning.TEXT
    if per_token:
        return Conditioning.FIRST_FRAME
    return Conditioning.CHANNELS if name == IMAGE_TO_VIDEO else Conditioning.TEXT


def _required(checkpoint: Checkpoint, file: str) -> Mapping[str, Any]:
    values = checkpoint.read(file)
    if not values:
        raise CheckpointError(f"{checkpoint} has no {file}: is the download complete?")
    return values


def _why_not(checkpoint: Checkpoint, layout: WanLayout) -> str | None:
    """Why the checkpoint cannot be served, or ``None`` where it can."""
    named = [key for key in CLIP_CONDITIONED if layout.transformer.get(key) is not None]
    if named:
        return (
            f"the transformer takes embeddings of a CLIP image encoder ({named[0]} is set), as Wan 2.1 image to video "
            "does; that is not supported, Wan 2.2 image to video is"
        )
    if reason := _why_not_channels(layout):
        return reason
    if layout.conditioning == Conditioning.FIRST_FRAME and layout.patch_size != (1, 2, 2):
        return f"with timesteps per token the patch must be (1, 2, 2), not {layout.patch_size}"
    if layout.few_steps and len(layout.experts) == 2:
        return "it is distilled to few steps and has two experts; few steps are supported with one"
    if len(layout.experts) == 2:
        second = _required(checkpoint, "transformer_2/config.json")
        if different := sorted(k for k in layout.transformer if k[0] != "_" and layout.transformer[k] != second.get(k)):
            return f"transformer and transformer_2 differ in {different[0]}; experts of unlike shape are not supported"
    return None if layout.few_steps else _why_not_scheduler(layout.scheduler)


def _why_not_channels(layout: WanLayout) -> str | None:
    channels, latent_channels = layout.transformer.get("in_channels", 16), layout.vae.get("z_dim", 16)
    if layout.conditioning == Conditioning.CHANNELS:
        wanted = 2 * latent_channels + layout.temporal_scale
        if channels != wanted:
            return f"the transformer takes {channels} channels; noise, mask and condition have {wanted}"
    elif channels != latent_channels:
        return (
            f"the transformer takes {channels} channels and the VAE gives {latent_channels}; with other inputs than "
            f"noise only {IMAGE_TO_VIDEO} is supported"
        )
    return None


def _why_not_scheduler(scheduler: Mapping[str, Any]) -> str | None:
    name = scheduler.get("_class_name")
    if name not in SOLVERS:
        return f"its scheduler is {name}; only {' and '.join(SOLVERS)} are supported"
    unipc = SOLVERS[name] == "unipc"
    if unipc and not (scheduler.get("use_flow_sigmas") and scheduler.get("prediction_type") == "flow_prediction"):
        return "its scheduler does not use flow sigmas and flow prediction, which Wan needs"
    if used := [key for key in UNUSUAL if scheduler.get(key)]:
        return f"its scheduler sets {used[0]}, which is not supported"
    return None
