"""Strict, streaming loading of one component's weights: every expected tensor exactly once, and nothing else.

A component is a folder of a diffusers checkpoint: one ``*.safetensors`` file, or shards with a
``*.safetensors.index.json``. What is expected follows from the module itself: its parameters and persistent buffers,
with one tensor per shard for vLLM's fused linear layers (``q``, ``k``, ``v`` of ``QKVParallelLinear``). Names are
compared before any weight is read; then each tensor goes straight from the mapped file to its parameter, so a model is
never in memory twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from omni_core.errors import CheckpointError
from omni_core.weights import LOADABLE, listed, open_weights, weight_files

ShardId = str | int
NameOf = Callable[[str, ShardId | None], str]
"""``(parameter, shard) -> tensor name in the checkpoint``; ``shard`` is ``None`` for what is not fused."""


def same_name(parameter: str, shard: ShardId | None) -> str:
    """The checkpoint calls every tensor what the module calls it."""
    if shard is not None:
        raise ValueError(f"{parameter} is fused: say what the checkpoint calls its shard {shard!r}")
    return parameter


def load_weights(module: nn.Module, folder: Path, name_of: NameOf = same_name) -> None:
    """Fill ``module`` with the weights in ``folder`` and prepare its vLLM layers for use.

    Parameters that share storage (tied weights) may be stored under any of their names, or under several that agree.

    Raises:
        CheckpointError: no usable weight files; a tensor is missing, unexpected, of another shape, or quantized.
    """
    slots = list(_slots(module, name_of))
    files = weight_files(folder)
    _check_names(folder, slots, files)
    by_file: dict[Path, list[tuple[str, _Slot]]] = defaultdict(list)
    for slot in slots:
        for name in slot.names:
            if name in files:
                by_file[files[name]].append((name, slot))
    filled: set[int] = set()
    with torch.no_grad():
        for file, entries in by_file.items():
            with open_weights(file) as tensors:
                for name, slot in entries:
                    slot.take(name, tensors.get_tensor(name), file, verify=id(slot) in filled)
                    filled.add(id(slot))
    _prepare(module)


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer that lies on the meta device uninitialised memory on ``device``.

    Unlike ``nn.Module.to_empty`` it keeps tied parameters tied.

    Raises:
        ValueError: the module has a buffer that no checkpoint holds, whose contents would be lost.
    """
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device=device)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta and name in owner._non_persistent_buffers_set:
                raise ValueError(
                    f"{_join(prefix, name)} is not stored in checkpoints and would be lost on the meta device"
                )
        for values in (owner._parameters, owner._buffers):
            for name, value in values.items():
                if value is not None and value.is_meta:
                    values[name] = real(value)


@dataclass(frozen=True)
class _Slot:
    """Where one tensor of the checkpoint goes: a parameter, or one shard of a fused one."""

    parameter: torch.Tensor
    shard: ShardId | None
    shape: tuple[int, ...]
    names: tuple[str, ...]

    def take(self, name: str, tensor: torch.Tensor, file: Path, verify: bool) -> None:
        """Copy ``tensor`` into the parameter; with ``verify``, check that it is already there (a tied weight)."""
        if tuple(tensor.shape) != self.shape:
            shape, expected = list(tensor.shape), list(self.shape)
            raise CheckpointError(
                f"{file}: {name} has shape {shape}, but the model's configuration asks for {expected}"
            )
        if self.parameter.is_floating_point() and tensor.dtype not in LOADABLE:
            raise CheckpointError(
                f"{file}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; quantized checkpoints "
                "cannot be loaded here, use one in float32, bfloat16 or float16"
            )
        if verify:
            if not torch.equal(self.parameter, tensor.to(self.parameter.device, self.parameter.dtype)):
                raise CheckpointError(f"{file}: {listed(self.names)} must be equal, since the model ties them")
            return
        loader = getattr(self.parameter, "weight_loader", default_weight_loader)
        if self.shard is None:
            loader(self.parameter, tensor)
        else:
            loader(self.parameter, tensor, self.shard)


def _slots(module: nn.Module, name_of: NameOf) -> Iterator[_Slot]:
    owners: dict[int, tuple[torch.Tensor, nn.Module]] = {}
    names: dict[int, list[str]] = defaultdict(list)
    for prefix, owner in module.named_modules():
        stored = {n: b for n, b in owner._buffers.items() if n not in owner._non_persistent_buffers_set}
        for name, tensor in {**owner._parameters, **stored}.items():
            if tensor is not None:
                owners.setdefault(id(tensor), (tensor, owner))
                names[id(tensor)].append(_join(prefix, name))
    for key, (tensor, owner) in owners.items():
        for shard, shape in _shards(owner, tensor):
            yield _Slot(tensor, shard, tuple(shape), tuple(name_of(name, shard) for name in names[key]))


def _shards(owner: nn.Module, tensor: torch.Tensor) -> Iterable[tuple[ShardId | None, Iterable[int]]]:
    """The shards of one parameter, each with the shape that it has in a checkpoint (over all ranks).

    A layer of a family's own that splits a parameter over ranks says so in the parameter's ``full_shape``.
    """
    rows: Mapping[ShardId | None, int]
    if isinstance(owner, QKVParallelLinear):
        kv = owner.total_num_kv_heads
        rows = {
            "q": owner.total_num_heads * owner.head_size,
            "k": kv * owner.head_size,
            "v": kv * owner.v_head_size,
        }
    elif isinstance(owner, MergedColumnParallelLinear):
        rows = dict(enumerate(owner.output_sizes))
    elif isinstance(owner, LinearBase):
        rows = {None: owner.output_size}
    else:
        return [(None, getattr(tensor, "full_shape", tensor.shape))]
    columns = [owner.input_size] if tensor.dim() == 2 else []
    return [(shard, [size, *columns]) for shard, size in rows.items()]


def _check_names(folder: Path, slots: list[_Slot], files: Mapping[str, Path]) -> None:
    expected: set[str] = set()
    for slot in slots:
        if twice := expected.intersection(slot.names):
            raise ValueError(f"two parameters would be filled from {listed(sorted(twice))}")
        expected.update(slot.names)
    missing = [slot.names[0] for slot in slots if not any(name in files for name in slot.names)]
    unexpected = sorted(files.keys() - expected)
    complaints = [
        f"{len(names)} {kind} ({listed(names)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if complaints:
        raise CheckpointError(f"{folder}: the tensors do not fit the model: {', '.join(complaints)}")


def _prepare(module: nn.Module) -> None:
    """Let every vLLM layer bring its weights into the form that its kernels want, as vLLM's own loaders do."""
    for layer in module.modules():
        if isinstance(layer, LinearBase):
            layer.quant_method.process_weights_after_loading(layer)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
