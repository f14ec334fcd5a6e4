"""Weights of a decoder behind its dequantiser: what checkpoints call them, and as the network has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from omni_core.errors import CheckpointError
from omni_speech_codec.codec_network import CodecNetwork
from omni_speech_codec.streaming_layers import GatedMLP, SlidingAttention, Snake
from omni_speech_codec.weights import Named


def check_known(what: str, hidden_act: str, rope_type: str | None) -> None:
    """Refuse a configuration that asks for what the network does not have.

    Raises:
        CheckpointError: with ``what`` the configuration is of.
    """
    for name, said, supported in (("hidden_act", hidden_act, "silu"), ("rope_type", rope_type, "default")):
        if said != supported:
            raise CheckpointError(f"{what} has {name} {said!r}; only {supported!r} is known")


def fill(
    network: CodecNetwork, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device, dtype: torch.dtype
) -> CodecNetwork:
    """Put ``weights``, all of them, into a network that is on the meta device, and end its training."""
    state = {name: tensor.to(device, dtype) for name, tensor in weights}
    network.load_state_dict(state, strict=True, assign=True)
    network.requires_grad_(False).eval()
    return network


def network_weights(stored: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The network's parameters: matrices that are multiplied with the same input as one, and what is constant, done.

    Args:
        stored: float32, by the names that ``stored_tensors`` says.
    """
    for name, tensor in stored.items():
        owner, _, last = name.rpartition(".")
        if last == "beta" or ".k_proj." in name or ".v_proj." in name:
            continue
        if last == "alpha":
            frequency, strength = Snake.from_logarithms(tensor, stored[f"{owner}.beta"])
            yield f"{owner}.frequency", frequency
            yield f"{owner}.strength", strength
        elif ".q_proj." in name:
            parts = [stored[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            yield name.replace(".q_proj.", ".qkv_proj."), torch.cat(parts)
        elif ".gate_proj." in name:
            up = stored[name.replace(".gate_proj.", ".up_proj.")]
            yield name.replace(".gate_proj.", ".gate_up_proj."), torch.cat((tensor, up))
        elif ".up_proj." not in name:
            yield name, tensor


def stored_tensors(network: CodecNetwork) -> Named:
    """Names and shapes of the checkpoint's tensors that ``network_weights`` makes the network's of.

    The dequantiser's are not among them.
    """
    parts: dict[str, list[tuple[str, int]]] = {}
    for name, module in network.named_modules():
        if isinstance(module, SlidingAttention):
            rows = [("q_proj", module.heads), ("k_proj", module.kv_heads), ("v_proj", module.kv_heads)]
            parts[f"{name}.qkv_proj"] = [(part, heads * module.head_dim) for part, heads in rows]
        elif isinstance(module, GatedMLP):
            half = module.down_proj.in_features
            parts[f"{name}.gate_up_proj"] = [("gate_proj", half), ("up_proj", half)]
    for name, parameter in network.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner in parts:
            for part, count in parts[owner]:
                yield f"{owner.rpartition('.')[0]}.{part}.{last}", (count, *parameter.shape[1:])
        elif not name.startswith("dequantizer."):
            yield name.replace(".frequency", ".alpha").replace(".strength", ".beta"), tuple(parameter.shape)
