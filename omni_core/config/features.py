"""Features that a configuration switches on, and whether the family knows that they work together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omni_core.config.model import Setting
from omni_core.errors import ConfigError
from omni_core.plugins.declarations import ModelFamily, Support

FEATURES: Mapping[str, Callable[[Mapping[str, Setting]], bool]] = {
    "tensor-parallel": lambda engine: "tensor_parallel_size" in engine and engine["tensor_parallel_size"].value > 1,
    "step-batching": lambda engine: "max_num_seqs" in engine and engine["max_num_seqs"].value != 1,
}
"""Name of each feature that ``ModelFamily.combinations`` speaks of, and when an engine configuration has it on."""


def enabled_features(engine: Mapping[str, Setting]) -> frozenset[str]:
    """The features that are on."""
    return frozenset(name for name, is_on in FEATURES.items() if is_on(engine))


def check_features(family: ModelFamily, enabled: frozenset[str]) -> list[str]:
    """Check the features that are on against the family's table; gives the warnings to show.

    A listed combination counts wherever all of its features are on. What is on altogether counts as tested only if
    that very combination is listed.

    Raises:
        ConfigError: the family lists a combination of them as unsupported.
    """
    apply = [cell for cell in family.combinations if cell.features <= enabled]
    for cell in apply:
        if cell.support is Support.UNSUPPORTED:
            raise ConfigError(f"family {family.name!r} does not support {_names(cell.features)}: {cell.reason}")
    warnings = [
        f"family {family.name!r} supports {_names(cell.features)} within limits: {cell.reason}"
        for cell in apply
        if cell.support is Support.LIMITED
    ]
    known = {cell.features for cell in apply if cell.support is not Support.UNTESTED}
    if enabled and enabled not in known:
        warnings.append(f"family {family.name!r} is untested with {_names(enabled)}")
    return warnings


def _names(features: frozenset[str]) -> str:
    return " + ".join(sorted(features))
