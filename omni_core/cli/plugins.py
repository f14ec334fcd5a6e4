"""``omni plugins``: which plugins are installed, what is wrong with them, and which serves a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import omni_core
from omni_core.errors import ConfigError
from omni_core.plugins.declarations import PLUGIN_API
from omni_core.plugins.loading import KINDS, PluginEntry, PluginRecord
from omni_core.plugins.manager import PluginManager, get_manager
from omni_core.plugins.matching import Explanation
from omni_core.plugins.versions import find_vllm

if TYPE_CHECKING:
    # argparse's type of "subparsers" has no public name.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

PIPED_WIDTH = 200


def add_parser(subparsers: Subparsers) -> None:
    """Add ``omni plugins`` to the command line."""
    parser = subparsers.add_parser(
        "plugins",
        help="list and check plugins, or explain which one serves a checkpoint",
        description="List plugins (the default), check them all, or explain which one serves a checkpoint.",
    )
    parser.add_argument("action", nargs="?", choices=("list", "check", "why"), default="list")
    parser.add_argument("checkpoint", nargs="?", help="with 'why': a local folder or a hub id")
    parser.add_argument("--revision", help="with 'why': branch, tag or commit on the hub")
    add_common_arguments(parser)
    parser.set_defaults(run=run)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every command about plugins has."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--allow-version-mismatch",
        action="store_true",
        help="let plugins through whose version ranges do not admit what is installed",
    )


def run(args: argparse.Namespace) -> int:
    """Do what ``omni plugins`` was asked. 0 if all is well, else 2.

    Raises:
        ConfigError: the action and the checkpoint do not go together.
        CheckpointError: the checkpoint cannot be found or read.
    """
    if (args.action == "why") != (args.checkpoint is not None):
        raise ConfigError("usage: omni plugins [list], omni plugins check, or omni plugins why CHECKPOINT")
    if args.revision is not None and args.action != "why":
        raise ConfigError("--revision goes with 'omni plugins why CHECKPOINT'")
    manager = get_manager(allow_version_mismatch=args.allow_version_mismatch)
    if args.action == "why":
        return _why(manager, args)
    return _check(manager, args) if args.action == "check" else _list(manager, args)


def _list(manager: PluginManager, args: argparse.Namespace) -> int:
    if args.json:
        vllm = find_vllm()
        print_json(
            {
                "omni_core": omni_core.__version__,
                "plugin_api": PLUGIN_API,
                "vllm": {"distribution": vllm.distribution, "version": vllm.version} if vllm else None,
                "plugins": [describe_record(record) for record in manager.records],
            }
        )
        return 0
    rows = [
        (r.entry.name, r.entry.distribution, r.entry.version, r.state, "\n".join(_contributions(r)), r.reason or "")
        for r in manager.records
    ]
    print_table(
        ("plugin", "distribution", "version", "state", "contributes", "reason"), rows, "No plugin is installed."
    )
    for record in manager.records:
        if record.traceback:
            print(f"\n{record.entry}:\n{record.traceback.rstrip()}")
    return 0


def _check(manager: PluginManager, args: argparse.Namespace) -> int:
    problems = manager.problems()
    if args.json:
        print_json({"plugins": [describe_record(record) for record in manager.records], "problems": problems})
    else:
        for problem in problems:
            print(problem)
        if not problems:
            print(f"{len(manager.records)} plugins, no problem")
    return 2 if problems else 0


def _why(manager: PluginManager, args: argparse.Namespace) -> int:
    from omni_core.checkpoint import Checkpoint

    checkpoint = Checkpoint(args.checkpoint, args.revision)
    explanation = manager.explain(checkpoint)
    if args.json:
        print_json({"checkpoint": checkpoint.source, **describe_explanation(explanation)})
    else:
        rows = [
            ("serves" if c.chosen else "", c.family.name if c.family else "", _short(c.plugin), c.reason)
            for c in explanation.candidates
        ]
        print_table(("", "family", "plugin", "why, or why not"), rows, "No family is installed.")
    if explanation.error is None:
        return 0
    print(f"error: {explanation.error}", file=sys.stderr)
    return explanation.error.exit_code


def _contributions(record: PluginRecord) -> list[str]:
    return [f"{KINDS[type(declaration)]} {declaration.name}" for declaration in record.declarations]


def _short(entry: PluginEntry) -> str:
    return f"{entry.distribution} {entry.version}"


def describe_record(record: PluginRecord) -> dict[str, Any]:
    """A plugin's record as JSON has it."""
    requirements = record.requirements
    return {
        "name": record.entry.name,
        "value": record.entry.value,
        "distribution": record.entry.distribution,
        "version": record.entry.version,
        "state": record.state.value,
        "reason": record.reason,
        "requires": {"plugin-api": requirements.plugin_api, **requirements.ranges} if requirements else None,
        "contributes": [{"kind": KINDS[type(d)], "name": d.name} for d in record.declarations],
        "traceback": record.traceback,
    }


def describe_explanation(explanation: Explanation) -> dict[str, Any]:
    """Who serves a checkpoint, as JSON has it."""
    return {
        "family": explanation.family.name if explanation.family else None,
        "error": str(explanation.error) if explanation.error else None,
        "candidates": [
            {
                "family": candidate.family.name if candidate.family else None,
                "distribution": candidate.plugin.distribution,
                "version": candidate.plugin.version,
                "specificity": candidate.specificity,
                "chosen": candidate.chosen,
                "reason": candidate.reason,
            }
            for candidate in explanation.candidates
        ],
    }


def print_json(value: Mapping[str, Any]) -> None:
    """Print a value as JSON for people and programs alike."""
    print(json.dumps(value, indent=2, default=str))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """Print a table as wide as the terminal, or wide enough for grep where the output is piped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell), overflow="fold") for cell in row))
    if not table.row_count:
        print(empty)
        return
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
