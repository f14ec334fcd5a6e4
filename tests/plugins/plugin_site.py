"""A folder of real distributions on the path of a fresh interpreter that sees no other: nothing here is mocked."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARIES = ("pluggy", "packaging", "rich", "markdown_it", "mdurl", "pygments")

HEADER = """
from omni_core.plugins.declarations import *
from omni_core.plugins.hookspecs import hookimpl
from omni_core.plugins.predicates import *
"""
REQUIREMENTS = """
@hookimpl
def omni_requirements():
    return Requirements("1.0", {})
"""


def family(name: str = "toy", matches: str = "ModelType('toy')") -> str:
    """Source of a hook that declares one model family."""
    return f"""
@hookimpl
def omni_model_families():
    text = (Cardinality(Modality.TEXT),)
    return [ModelFamily("{name}", {matches}, text, text, pipeline="toy:pipeline", request="toy:request")]
"""


class Site:
    """A site-packages folder of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        for name in LIBRARIES:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            (path / name).symlink_to(Path(spec.origin).parent)
        (path / "omni_core").symlink_to(REPOSITORY / "omni_core")

    def distribution(
        self,
        name: str,
        version: str = "0.1.0",
        *,
        modules: Mapping[str, str] | None = None,
        entry_points: Mapping[str, str] | None = None,
        requires: Sequence[str] = (),
    ) -> None:
        """Install a distribution: ``modules`` is source by file name, ``entry_points`` the group of Omni."""
        for file, source in (modules or {}).items():
            (self.path / file).parent.mkdir(parents=True, exist_ok=True)
            (self.path / file).write_text(source)
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        metadata += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(metadata) + "\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in modules or {}))
        points = [f"{key} = {value}" for key, value in (entry_points or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[omni_core.plugins]", *points]) + "\n")

    def plugin(
        self,
        name: str,
        source: str,
        version: str = "0.1.0",
        *,
        distribution: str | None = None,
        requirements: str = REQUIREMENTS,
        requires: Sequence[str] = (),
    ) -> None:
        """Install a plugin whose entry point ``name`` is a module of that name."""
        module = name.replace("-", "_")
        self.distribution(
            distribution or f"omni-plugin-{name}",
            version,
            modules={f"{module}.py": HEADER + requirements + source},
            entry_points={name: module},
            requires=requires,
        )

    def vllm(self, distribution: str = "vllm", version: str = "0.32.0", *, metadata: bool = True) -> None:
        """Install a vLLM that fails when it is imported: versions are read without importing it."""
        modules = {
            "vllm/__init__.py": "raise AssertionError('vllm was imported')\n",
            "vllm/_version.py": f"version: str\n__version__: str\n__version__ = version = '{version}'\n",
        }
        if metadata:
            self.distribution(distribution, version, modules=modules)
        else:
            for file, source in modules.items():
                (self.path / file).parent.mkdir(exist_ok=True)
                (self.path / file).write_text(source)

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run Python with this folder as its only site-packages."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMNI_", "PYTHON"))}
        return subprocess.run(
            [sys.executable, "-S", "-P", *arguments],
            env={**inherited, "PYTHONPATH": str(self.path), "COLUMNS": "300", **(env or {})},
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def python(self, code: str, env: Mapping[str, str] | None = None) -> str:
        """Run a program with ``manager = PluginManager.scan()`` ready; what it prints."""
        prelude = "from omni_core.plugins.manager import PluginManager\nmanager = PluginManager.scan()\n"
        done = self.run("-c", prelude + code, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def omni(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command ``omni``."""
        return self.run("-m", "omni_core.cli.main", *arguments, env=env)

    def records(self, *flags: str) -> dict[str, dict[str, Any]]:
        """What ``omni plugins --json`` says of every plugin, by name."""
        done = self.omni("plugins", "--json", *flags)
        assert done.returncode == 0, done.stderr
        return {record["name"]: record for record in json.loads(done.stdout)["plugins"]}

    def record(self, name: str, *, allow_version_mismatch: bool = False) -> dict[str, Any]:
        """What it says of one plugin."""
        return self.records(*(["--allow-version-mismatch"] if allow_version_mismatch else []))[name]
