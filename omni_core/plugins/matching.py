"""Which family serves a checkpoint, and why, or why not, for every candidate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from packaging.utils import canonicalize_name

from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError, MissingPlugin, OmniError, PluginError
from omni_core.plugins.declarations import ModelFamily
from omni_core.plugins.loading import PluginEntry, PluginRecord, one_line
from omni_core.plugins.predicates import (
    ABSENT,
    CONFIG,
    MODEL_INDEX,
    All,
    AnyOf,
    Architecture,
    ConfigFiles,
    Key,
    Predicate,
    lookup,
)
from omni_core.plugins.table import KnownPlugin, known_plugins


@dataclass(frozen=True)
class Candidate:
    """One family, or one plugin that could not be asked, before a checkpoint.

    Attributes:
        plugin: where the family comes from.
        family: ``None`` for a plugin that is broken or incompatible, and so has no families.
        specificity: how many conditions hold, ``None`` if the family does not claim the checkpoint.
        reason: in words, why it serves the checkpoint or does not.
        chosen: whether it serves the checkpoint.
    """

    plugin: PluginEntry
    family: ModelFamily | None
    specificity: int | None
    reason: str
    chosen: bool = False


@dataclass(frozen=True)
class Explanation:
    """The answer for a checkpoint: every candidate, and the family that serves it or the error that says why none."""

    candidates: tuple[Candidate, ...]
    family: ModelFamily | None
    error: OmniError | None


def explain(records: Sequence[PluginRecord], checkpoint: Checkpoint) -> Explanation:
    """Ask every family. The order of ``records`` does not matter.

    Raises:
        CheckpointError: the checkpoint cannot be found or read.
    """
    candidates = [_ask(record, family, checkpoint) for record in records for family in _families(record)]
    candidates += [Candidate(r.entry, None, None, str(r.error())) for r in records if r.failed]
    candidates.sort(key=lambda c: (-(c.specificity or 0), c.family.name if c.family else "", c.plugin))
    claims = [c for c in candidates if c.specificity is not None]
    best = [c for c in claims if c.specificity == claims[0].specificity]
    error = _table_error(records, checkpoint, bool(claims)) or _claim_error(best, records, checkpoint)
    chosen = best[0] if error is None else None
    judged = tuple(_judge(candidate, best, chosen) for candidate in candidates)
    return Explanation(judged, chosen.family if chosen else None, error)


def _families(record: PluginRecord) -> Iterable[ModelFamily]:
    return (d for d in record.declarations if isinstance(d, ModelFamily))


def _ask(record: PluginRecord, family: ModelFamily, checkpoint: Checkpoint) -> Candidate:
    try:
        specificity = family.matches.specificity(checkpoint)
        if specificity is not None and type(specificity) is not int:
            raise TypeError(f"a specificity is a whole number or None, not {specificity!r}")
        reason = f"{family.matches} holds" if specificity is not None else why_not(family.matches, checkpoint)
    except CheckpointError:
        raise
    except (Exception, SystemExit) as error:  # a predicate of a plugin's own
        specificity, reason = None, f"its predicate raised {one_line(error)}"
    return Candidate(record.entry, family, specificity, reason)


def _judge(candidate: Candidate, best: Sequence[Candidate], chosen: Candidate | None) -> Candidate:
    if candidate.specificity is None:
        return candidate
    counted = f"{candidate.reason} (specificity {candidate.specificity})"
    if candidate is chosen:
        return replace(candidate, reason=counted, chosen=True)
    if candidate in best:
        rivals = ", ".join(str(other.plugin) for other in best if other is not candidate)
        return replace(candidate, reason=counted + (f", but so it does for {rivals}" if rivals else ""))
    winner = best[0]
    assert winner.family is not None
    return replace(candidate, reason=f"{counted}, but {winner.family.name} is more specific ({winner.specificity})")


def _table_error(records: Sequence[PluginRecord], checkpoint: Checkpoint, claimed: bool) -> OmniError | None:
    """What the table of first-party plugins has to say: its plugin for this checkpoint failed, or is missing."""
    for known in known_plugins():
        if not known.handles(checkpoint):
            continue
        record = find_known(records, known)
        if record is not None and record.failed:
            return record.error()
        if record is None and not claimed:
            return MissingPlugin(
                f"checkpoint {checkpoint} needs the plugin {known.distribution}, which is not installed; "
                f"run: {known.install}"
            )
    return None


def find_known(records: Iterable[PluginRecord], known: KnownPlugin) -> PluginRecord | None:
    """The record of a plugin of the table, if it is installed."""
    wanted = (known.name, canonicalize_name(known.distribution))
    return next((r for r in records if (r.entry.name, canonicalize_name(r.entry.distribution)) == wanted), None)


def _claim_error(
    best: Sequence[Candidate], records: Sequence[PluginRecord], checkpoint: Checkpoint
) -> OmniError | None:
    if len(best) == 1:
        family, entry = best[0].family, best[0].plugin
        same = [r.entry for r in records for f in _families(r) if family and f.name == family.name]
        return duplicate_error("model", family.name, same) if family and len(same) > 1 and entry in same else None
    if best:
        rivals = " and ".join(f"{c.family.name!r} of {c.plugin}" for c in best if c.family)
        return PluginError(
            f"checkpoint {checkpoint} is claimed equally (specificity {best[0].specificity}) by {rivals}; "
            "uninstall one of them"
        )
    failed = ", ".join(str(record.entry) for record in records if record.failed)
    return MissingPlugin(
        f"no installed plugin serves checkpoint {checkpoint} ({summarise(checkpoint)})"
        + (f"; not asked, because broken or incompatible: {failed}" if failed else "")
        + f"; run: omni plugins why {checkpoint.source}"
    )


def duplicate_error(kind: str, name: str, entries: Iterable[PluginEntry]) -> PluginError:
    """Two distributions declare one name."""
    return PluginError(f"{kind} {name!r} is declared by {' and by '.join(map(str, entries))}; uninstall one of them")


def summarise(files: ConfigFiles) -> str:
    """What a checkpoint says it is."""
    config, index = files.read(CONFIG), files.read(MODEL_INDEX)
    said = [f"{key} = {config[key]!r}" for key in ("model_type", "architectures") if key in config]
    said += [f"_class_name = {index['_class_name']!r}"] if "_class_name" in index else []
    return ", ".join(said) or f"neither {CONFIG} nor {MODEL_INDEX} says what it is"


def why_not(predicate: Predicate, files: ConfigFiles) -> str:
    """Why a predicate does not hold: the condition at fault, and what the checkpoint says instead."""
    if isinstance(predicate, All):
        failed = (p for p in predicate.predicates if p.specificity(files) is None)
        return "; ".join(why_not(p, files) for p in failed)
    if isinstance(predicate, AnyOf):
        return "; ".join(why_not(p, files) for p in predicate.predicates)
    if isinstance(predicate, Key):
        value = lookup(files, predicate.file, predicate.path)
        return f"{predicate} does not hold: " + ("it is not there" if value is ABSENT else f"it is {value!r}")
    if isinstance(predicate, Architecture):
        return f"{predicate} does not hold: it is {files.read(CONFIG).get('architectures')!r}"
    return f"{predicate} does not hold"
