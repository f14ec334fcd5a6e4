"""``omni doctor``: one report on everything that serving depends on, with what mends each thing that is wrong."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import omni_core
from omni_core.cli.plugins import (
    add_common_arguments,
    describe_explanation,
    describe_record,
    print_json,
    print_table,
)
from omni_core.errors import OmniError
from omni_core.plugins.declarations import PLUGIN_API, load_reference
from omni_core.plugins.loading import one_line
from omni_core.plugins.manager import PluginManager, get_manager
from omni_core.plugins.matching import Explanation
from omni_core.plugins.versions import find_distribution, find_vllm, require_vllm, supported_vllm

if TYPE_CHECKING:
    from omni_core.cli.plugins import Subparsers

CHILD_TIMEOUT = 120
"""Seconds for a child process to import vLLM; on a cold file system that takes most of a minute."""

PROBE = "omni_core.vllm.probe"


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    status: Status
    detail: str


def add_parser(subparsers: Subparsers) -> None:
    """Add ``omni doctor`` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check everything that serving depends on",
        description="Check Python, vLLM, torch, the hardware, the plugins, and whether a checkpoint can be served.",
    )
    parser.add_argument("checkpoint", nargs="?", help="a local folder or a hub id")
    parser.add_argument("--revision", help="branch, tag or commit of the checkpoint on the hub")
    add_common_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. 0 if nothing stands in the way of serving, else 2."""
    manager = get_manager(allow_version_mismatch=args.allow_version_mismatch)
    findings = list(_environment(args.allow_version_mismatch))
    findings += _hardware(manager)
    findings += [Finding("plugins", Status.WARNING, problem) for problem in manager.problems()] or [
        Finding("plugins", Status.OK, ", ".join(str(r.entry) for r in manager.records) or "none")
    ]
    explanation = None
    if args.checkpoint is not None:
        finding, explanation = _checkpoint(manager, args.checkpoint, args.revision)
        findings.append(finding)
    if args.json:
        report = {"findings": [asdict(f) for f in findings], "plugins": [describe_record(r) for r in manager.records]}
        print_json(report if explanation is None else {**report, "checkpoint": describe_explanation(explanation)})
    else:
        print_table(("check", "status", "detail"), [(f.check, f.status, f.detail) for f in findings], "")
    return 2 if any(finding.status is Status.ERROR for finding in findings) else 0


def _environment(allow_version_mismatch: bool) -> Iterator[Finding]:
    yield Finding("Python", Status.OK, f"{platform.python_version()} at {sys.executable}")
    yield Finding("omni-core", Status.OK, f"{omni_core.__version__}, plugin API {PLUGIN_API}")
    try:
        vllm = require_vllm(allow_version_mismatch=allow_version_mismatch)
        yield Finding("vLLM", Status.OK, f"{vllm} (supported: {supported_vllm() or 'unknown'})")
    except OmniError as error:
        yield Finding("vLLM", Status.ERROR, str(error))
    torch = find_distribution("torch")
    yield Finding("torch", Status.OK if torch else Status.ERROR, str(torch or "not installed; it comes with vLLM"))
    yield _other_server()


def _other_server() -> Finding:
    """The distribution vllm-omni owns the same top-level package as the shim by which vLLM's own command finds us."""
    try:
        version = importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError:
        return Finding("vllm-omni", Status.OK, "not installed (it would collide with omni-core)")
    return Finding(
        "vllm-omni",
        Status.ERROR,
        f"vllm-omni {version} is installed too; both own the package vllm_omni, so whichever came last answers "
        "'vllm serve --omni'; run: pip uninstall vllm-omni && pip install --force-reinstall --no-deps omni-core",
    )


def _hardware(manager: PluginManager) -> list[Finding]:
    """What vLLM runs on, asked in a child process, since asking imports vLLM and torch and may touch the device."""
    if find_vllm() is None:
        return [Finding("platform", Status.SKIPPED, "needs vLLM")]
    line, error = _run_module(PROBE)
    answer = {} if error else json.loads(line)
    device_type = answer.get("device_type")
    if not device_type:
        return [Finding("platform", Status.ERROR, f"vLLM does not say what it runs on: {error or 'no platform found'}")]
    try:
        found = manager.platform(device_type)
        findings = [Finding("platform", Status.OK, f"{device_type}, served by {manager.provider(found).entry}")]
    except OmniError as reason:
        findings = [Finding("platform", Status.ERROR, f"vLLM runs on {device_type!r}: {reason}")]
    if answer["missing"]:
        lacks = f"this vLLM lacks {', '.join(answer['missing'])}"
        return [*findings, Finding("vLLM symbols", Status.ERROR, lacks)]
    return [*findings, Finding("vLLM symbols", Status.OK, f"all {answer['symbols']} that the core touches")]


def _run_module(module: str) -> tuple[str, str | None]:
    """Run ``python -m module``: the last line that it printed, and one line on how it failed, if it did."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], capture_output=True, text=True, timeout=CHILD_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"python -m {module} did not end within {CHILD_TIMEOUT} s"
    last_line = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [last_line])[-1]
        return last_line, f"python -m {module} exited with {done.returncode}: {said}"
    return last_line, None


def _checkpoint(manager: PluginManager, source: str, revision: str | None) -> tuple[Finding, Explanation | None]:
    from omni_core.checkpoint import Checkpoint

    explanation = None
    try:
        checkpoint = Checkpoint(source, revision)
        explanation = manager.explain(checkpoint)
        family = manager.match(checkpoint)
        pipeline = load_reference(family.pipeline)(checkpoint)
        stages = ", ".join(stage.name for stage in pipeline.stages)
        detail = f"{source}: family {family.name} of {manager.provider(family).entry}, stages: {stages}"
        return Finding("checkpoint", Status.OK, detail), explanation
    except OmniError as error:
        return Finding("checkpoint", Status.ERROR, str(error)), explanation
    except Exception as error:  # the family's own code
        return Finding("checkpoint", Status.ERROR, f"{source}: its family failed: {one_line(error)}"), explanation
