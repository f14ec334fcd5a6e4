"""The memory-bound parts of a block as vLLM custom operations: PyTorch everywhere, fused kernels on CUDA devices.

vLLM's ``CustomOp`` chooses by platform, and lets a vendor put in another form by name (``CustomOp.register_oot``).
Both forms compute in float32 and round at the same places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from vllm.model_executor.custom_op import CustomOp

from omni_plugin_wan22 import kernels


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbouring channels of ``x`` [B, S, H, head_dim] by its angle, in float32."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x * (1 + scale) + shift`` of ``x`` [B, S, D], each of the G equal runs of tokens by its own [B, G, 1, D]."""
    return torch.addcmul(shift, x.unflatten(1, (shift.shape[1], -1)), 1 + scale).flatten(1, 2)


@CustomOp.register("omni_wan_residual_norm")
class ResidualNorm(CustomOp):
    """Add a branch to the residual stream, and normalise the sum for the next branch."""

    def __init__(self, eps: float) -> None:
        super().__init__(enforce_enable=True)
        self.eps = eps

    def forward_native(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        gate: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        *,
        modulation: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x + branch * gate`` and its layer norm, in the dtype of ``x`` [B, S, D].

        Args:
            x: the residual stream.
            branch: like ``x``, or ``None`` where nothing is added.
            gate: float32 [B, G, 1, D], one row for each run of S / G tokens, or ``None`` for 1.
            scale: with ``modulation`` like ``gate``, what is added to 1; without, the norm's weight, float32 [D].
            shift: what is added after scaling, shaped like ``scale``.
            modulation: which of the two.
        """
        if branch is not None:
            x = gated_add(x, branch, gate)
        if modulation:
            return x, modulate(F.layer_norm(x.float(), x.shape[-1:], eps=self.eps), shift, scale).type_as(x)
        return x, F.layer_norm(x.float(), x.shape[-1:], scale, shift, self.eps).type_as(x)

    def forward_cuda(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        gate: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        *,
        modulation: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in one kernel."""
        return kernels.residual_norm(x, branch, gate, scale, shift, self.eps, 1.0 if modulation else 0.0)


def gated_add(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """``x + branch * gate`` as in ``ResidualNorm``, rounded once."""
    if gate is None:
        return x + branch
    return (x.float() + (branch.unflatten(1, (gate.shape[1], -1)) * gate).flatten(1, 2)).type_as(x)


@CustomOp.register("omni_wan_gated_add")
class GatedAdd(CustomOp):
    """Add a gated branch to the residual stream."""

    def __init__(self) -> None:
        super().__init__(enforce_enable=True)

    def forward_native(self, x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x + branch * gate``, shaped as in ``ResidualNorm``."""
        return gated_add(x, branch, gate)

    def forward_cuda(self, x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The same in one kernel."""
        return kernels.gated_add(x, branch, gate)


@CustomOp.register("omni_wan_norm_rotate")
class NormRotate(CustomOp):
    """RMS norm over all heads and rotary embedding of queries and keys, for the one rank that holds all heads."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__(enforce_enable=True)
        self.head_dim, self.eps = head_dim, eps

    def forward_native(
        self,
        qkv: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, [B, S, H, head_dim] each, of ``qkv`` [B, S, 3 * D], which may be overwritten.

        Args:
            qkv: queries, keys, values side by side.
            query_weight: [D]; ``key_weight`` likewise.
            cos: float32 [S, 1, head_dim / 2]; ``sin`` likewise.
        """
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.chunk(3, dim=-1))
        query = rotate(self._norm(query, query_weight), cos, sin)
        key = rotate(self._norm(key, key_weight), cos, sin)
        return query, key, value

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.flatten(2), weight.shape, weight, self.eps).view(x.shape)

    def forward_cuda(
        self,
        qkv: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same in one kernel, in place."""
        kernels.rms_norm_rotate_(qkv, query_weight, key_weight, cos, sin, self.head_dim, self.eps)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.chunk(3, dim=-1))
        return query, key, value
