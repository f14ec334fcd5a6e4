"""Strict reading of one part of a checkpoint folder: every tensor that it should have, and no other.

``omni_core.vllm.loading`` fills a module that is a whole folder. Here a folder holds several networks, such as a
talker and what makes sound of its codes; each is loaded where it runs, from the files that hold it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from omni_core.errors import CheckpointError
from omni_core.weights import LOADABLE, weight_files

Named = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""

ConfigT = TypeVar("ConfigT", bound=PreTrainedConfig)
_SHOWN = 5


def read_config(kind: type[ConfigT], folder: Path) -> ConfigT:
    """``config.json`` of ``folder``.

    Raises:
        CheckpointError: it is missing, no JSON, or of another ``model_type``.
    """
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values.get("model_type") != kind.model_type:
            raise ValueError(f"model_type is {values.get('model_type')!r}, expected {kind.model_type!r}")
        return kind(**values)
    except Exception as error:  # transformers' own checks raise several unrelated classes
        raise CheckpointError(f"{file}: not a usable configuration ({error})") from error


def read_part(folder: Path, part: str, expected: Named) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with ``part`` and a dot, float32 on the CPU, by the rest of their names.

    Args:
        folder: with safetensors files.
        part: such as ``decoder``.
        expected: names, of the whole folder or of the part, and shapes.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or quantized; or a file is unusable.
    """
    prefix = f"{part}."
    shapes = {name: shape for name, shape in expected if name.startswith(prefix)}
    files = {name: file for name, file in weight_files(folder).items() if name.startswith(prefix)}
    complaints = [
        f"{len(names)} {kind} ({_listed(names)})"
        for kind, names in (("missing", shapes.keys() - files.keys()), ("unexpected", files.keys() - shapes.keys()))
        if names
    ]
    if complaints:
        raise CheckpointError(f"{folder}: the tensors of {part} do not fit the model: {', '.join(complaints)}")
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, file in files.items():
        by_file[file].append(name)
    tensors: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        try:
            with safe_open(file, framework="pt") as stored:
                for name in names:
                    tensors[name.removeprefix(prefix)] = _checked(file, name, stored.get_tensor(name), shapes[name])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error
    return tensors


def _checked(file: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(
            f"{file}: {name} has shape {list(tensor.shape)}, but the model's configuration asks for {list(shape)}"
        )
    if tensor.dtype not in LOADABLE:
        raise CheckpointError(
            f"{file}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; quantized checkpoints "
            "cannot be loaded here, use one in float32, bfloat16 or float16"
        )
    return tensor.float()


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
