"""Predicates by which a model family claims checkpoints: conditions over the checkpoint's own configuration files.

A predicate answers with its *specificity*, the number of conditions that it checked and found true, or ``None``
where it does not hold. The family with the highest specificity serves the checkpoint; a tie between two families is
an error, so the order of installation never decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

CONFIG = "config.json"
MODEL_INDEX = "model_index.json"

ABSENT = object()
"""What ``lookup`` gives for a key that is not there; ``None`` is a value."""


class ConfigFiles(Protocol):
    """What a predicate reads: the parsed JSON of a file in the checkpoint's root, empty if the file is not there."""

    def read(self, file: str) -> Mapping[str, Any]: ...


class Predicate(Protocol):
    """A condition over a checkpoint."""

    def specificity(self, files: ConfigFiles) -> int | None:
        """Number of conditions found true, or ``None`` if the predicate does not hold."""


def lookup(files: ConfigFiles, file: str, path: str) -> Any:
    """The value at ``path`` (``"outer.inner"`` for a nested key) of a file, or ``ABSENT``."""
    value: Any = files.read(file)
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


@dataclass(frozen=True)
class Key:
    """A key (``"outer.inner"`` for a nested one) is present; with ``equals``, it has that value."""

    path: str
    equals: Any = ABSENT
    file: str = CONFIG

    def specificity(self, files: ConfigFiles) -> int | None:
        value = lookup(files, self.file, self.path)
        if value is ABSENT:
            return None
        if self.equals is ABSENT or (value == self.equals and type(value) is type(self.equals)):  # True is not 1
            return 1
        return None

    def __str__(self) -> str:
        return f"{self.file}: {self.path}" + ("" if self.equals is ABSENT else f" = {self.equals!r}")


def ModelType(name: str) -> Key:  # noqa: N802 - reads as a predicate beside the classes here
    """``config.json`` says this ``model_type``."""
    return Key("model_type", name)


def ClassName(name: str) -> Key:  # noqa: N802
    """``model_index.json`` says this ``_class_name``: the pipeline class of a diffusers checkpoint."""
    return Key("_class_name", name, MODEL_INDEX)


@dataclass(frozen=True)
class Architecture:
    """``config.json`` lists this name under ``architectures``."""

    name: str

    def specificity(self, files: ConfigFiles) -> int | None:
        listed = files.read(CONFIG).get("architectures")
        return 1 if isinstance(listed, list) and self.name in listed else None

    def __str__(self) -> str:
        return f"{CONFIG}: architectures has {self.name!r}"


@dataclass(frozen=True, init=False)
class All:
    """Every one of the given predicates holds; the specificities add up."""

    predicates: tuple[Predicate, ...]

    def __init__(self, *predicates: Predicate) -> None:
        object.__setattr__(self, "predicates", predicates)

    def specificity(self, files: ConfigFiles) -> int | None:
        total = 0
        for predicate in self.predicates:
            found = predicate.specificity(files)
            if found is None:
                return None
            total += found
        return total

    def __str__(self) -> str:
        return " and ".join(f"({p})" if isinstance(p, AnyOf) else str(p) for p in self.predicates)


@dataclass(frozen=True, init=False)
class AnyOf:
    """At least one of the given predicates holds; the most specific one counts."""

    predicates: tuple[Predicate, ...]

    def __init__(self, *predicates: Predicate) -> None:
        object.__setattr__(self, "predicates", predicates)

    def specificity(self, files: ConfigFiles) -> int | None:
        found = [s for s in (p.specificity(files) for p in self.predicates) if s is not None]
        return max(found) if found else None

    def __str__(self) -> str:
        return " or ".join(str(p) for p in self.predicates)


@dataclass(frozen=True)
class Not:
    """The given predicate does not hold."""

    predicate: Predicate

    def specificity(self, files: ConfigFiles) -> int | None:
        return 1 if self.predicate.specificity(files) is None else None

    def __str__(self) -> str:
        return f"not ({self.predicate})"
