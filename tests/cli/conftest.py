"""Commands in processes of their own, with the toy family installed; and vLLM's argument parsing in this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_core.plugins import manager as manager_module
from omni_core.plugins.manager import PluginManager


@pytest.fixture
def toy_plugin(toy_site, monkeypatch):
    """The toy family, known to this process."""
    monkeypatch.setattr(sys, "path", toy_site + sys.path)
    monkeypatch.setattr(manager_module, "_manager", PluginManager.scan())


@pytest.fixture(scope="session")
def command(toy_site):
    """Run a command of this environment: ``command("omni", "serve", ...)``."""
    path = os.pathsep.join([*toy_site, os.environ.get("PYTHONPATH", "")])

    def run(program, *words):
        return subprocess.run(
            [str(Path(sys.executable).parent / program), *map(str, words)],
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
