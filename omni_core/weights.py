"""Weight files of a folder, in safetensors; imports nothing of vLLM, so that small processes start fast."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from omni_core.errors import CheckpointError

LOADABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Element types of weights that are not quantized."""

_SHOWN = 5


def weight_files(folder: Path) -> dict[str, Path]:
    """Which file of ``folder`` holds each tensor, from the index where there is one.

    Raises:
        CheckpointError: there are no safetensors files, several without an index, or a shard is missing.
    """
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise CheckpointError(f"{folder}: more than one index of weights ({listed(p.name for p in indexes)}); keep one")
    if indexes:
        return _files_of_index(indexes[0])
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        with open_weights(files[0]) as tensors:
            return dict.fromkeys(tensors.keys(), files[0])
    if files:
        names = listed(p.name for p in files)
        raise CheckpointError(
            f"{folder}: several weight files ({names}) but no *.safetensors.index.json; keep one file"
        )
    if pickled := sorted(folder.glob("*.bin")):
        names = listed(p.name for p in pickled)
        raise CheckpointError(
            f"{folder} holds only pickled weights ({names}), which can run code when loaded; "
            "save the checkpoint again as safetensors"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file")


def _files_of_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors shards ({error!r})") from error
    outside = sorted({file.name for file in files.values() if file.parent != index.parent})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {listed(outside)}")
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise CheckpointError(
            f"{index} names files that are not there: {listed(absent)}; download the checkpoint again"
        )
    for file in sorted(set(files.values())):
        with open_weights(file) as tensors:
            stored = set(tensors.keys())
        said = {name for name, where in files.items() if where == file}
        if stored != said:
            raise CheckpointError(
                f"{file}: holds other tensors than {index.name} says: {listed(sorted(stored ^ said))}"
            )
    return files


def open_weights(file: Path) -> Any:
    """``safe_open`` of a file. Raises ``CheckpointError``."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
