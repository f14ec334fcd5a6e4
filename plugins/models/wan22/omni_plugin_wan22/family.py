"""Which Wan checkpoints can be served, and how: the checkpoint's own configuration decides. Import-light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError, UnsupportedCheckpoint
from omni_core.pipeline import DiffusionStage, Pipeline

OTHER_SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_dynamic_shifting")
IMAGE_CONDITIONED = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")


@dataclass(frozen=True)
class WanLayout:
    """A text-to-video checkpoint in diffusers' layout that this plugin can serve.

    Attributes:
        transformer: configuration of ``transformer``; ``transformer_2`` has the same shape.
        vae: configuration of ``vae``.
        scheduler: configuration of ``scheduler``.
        boundary_ratio: below this share of the training timesteps ``transformer_2`` takes over; ``None`` where
            ``transformer`` does all steps (Wan 2.1).
    """

    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    boundary_ratio: float | None

    @property
    def experts(self) -> tuple[str, ...]:
        """The folders of the experts, high noise first."""
        return ("transformer",) if self.boundary_ratio is None else ("transformer", "transformer_2")

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
    def flow_shift(self) -> float:
        return float(self.scheduler.get("flow_shift", 1.0))


def pipeline(checkpoint: Checkpoint) -> Pipeline:
    """One diffusion stage.

    Raises:
        UnsupportedCheckpoint: a Wan checkpoint of a kind that is not served yet.
        CheckpointError: a component is missing.
    """
    read_layout(checkpoint)
    return Pipeline((DiffusionStage(name="diffusion", model="omni_plugin_wan22.model:WanModel"),))


def read_layout(checkpoint: Checkpoint) -> WanLayout:
    """The checkpoint's configuration, checked; raises what ``pipeline`` raises."""
    index = checkpoint.read("model_index.json")
    for file in ("text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        _required(checkpoint, file)
    layout = WanLayout(
        transformer=_required(checkpoint, "transformer/config.json"),
        vae=_required(checkpoint, "vae/config.json"),
        scheduler=_required(checkpoint, "scheduler/scheduler_config.json"),
        boundary_ratio=index.get("boundary_ratio"),
    )
    if reason := _why_not(checkpoint, index, layout):
        raise UnsupportedCheckpoint(f"{checkpoint}: {reason}")
    return layout


def _required(checkpoint: Checkpoint, file: str) -> Mapping[str, Any]:
    values = checkpoint.read(file)
    if not values:
        raise CheckpointError(f"{checkpoint} has no {file}: is the download complete?")
    return values


def _why_not(checkpoint: Checkpoint, index: Mapping[str, Any], layout: WanLayout) -> str | None:
    """Why the checkpoint cannot be served, or ``None`` where it can."""
    if index.get("expand_timesteps"):
        return "expand_timesteps is true (Wan2.2 TI2V-5B, one timestep per token), which is not supported yet"
    named = [key for key in IMAGE_CONDITIONED if layout.transformer.get(key) is not None]
    if named:
        return f"the transformer is conditioned on images ({named[0]} is set); only text to video is supported yet"
    channels, latent_channels = layout.transformer.get("in_channels", 16), layout.vae.get("z_dim", 16)
    if channels != latent_channels:
        return (
            f"the transformer takes {channels} channels and the VAE gives {latent_channels}: image-conditioned "
            "checkpoints are not supported yet, only text to video"
        )
    if layout.boundary_ratio is not None:
        second = _required(checkpoint, "transformer_2/config.json")
        if different := sorted(k for k in layout.transformer if k[0] != "_" and layout.transformer[k] != second.get(k)):
            return f"transformer and transformer_2 differ in {different[0]}; experts of unlike shape are not supported"
    return _why_not_scheduler(layout.scheduler)


def _why_not_scheduler(scheduler: Mapping[str, Any]) -> str | None:
    name = scheduler.get("_class_name")
    if name != "UniPCMultistepScheduler":
        return f"its scheduler is {name}; only UniPCMultistepScheduler is supported yet"
    if not scheduler.get("use_flow_sigmas") or scheduler.get("prediction_type") != "flow_prediction":
        return "its scheduler does not use flow sigmas and flow prediction, which Wan needs"
    if used := [key for key in OTHER_SIGMAS if scheduler.get(key)]:
        return f"its scheduler sets {used[0]}, which is not supported"
    return None
