"""``vllm ... --omni``: vLLM's own command calls this whenever ``--omni`` is one of its words."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

from omni_core.cli.main import guarded, versions
from omni_core.errors import ConfigError, PluginError

FLAG = "--omni"
RIVAL = "vllm-omni"
"""The distribution whose top-level package has the same name as our shim: their files overwrite each other."""

USAGE = (
    "usage: vllm serve MODEL --omni [options]\n\nServe a model with Omni. See: vllm serve --omni --help, omni --help"
)


def main() -> None:
    """Do what the words of this process ask for, and exit."""
    sys.exit(guarded(lambda: run(sys.argv[1:])))


def run(words: Sequence[str]) -> int:
    """Do what the words after ``vllm`` ask for; ``--omni`` is one of them.

    Raises:
        PluginError: the distribution vllm-omni is installed too.
        ConfigError: a subcommand that Omni does not have, or none.
        OmniError: whatever serving raises.
    """
    _refuse_rival()
    command = next((word for word in words if not word.startswith("-")), None)
    before = [word for word in words[: words.index(command) if command else None] if word != FLAG]
    if "-v" in before or "--version" in before:
        print(versions())
        return 0
    if command == "serve":
        if before and not _is_help(before):
            raise ConfigError(f"unknown flag {before[0]!r} before 'serve'; write: vllm serve MODEL --omni [options]")
        from omni_core.cli import serve

        return serve.run([*before, *words[words.index(command) + 1 :]], "vllm serve")
    if command is None and _is_help(before):
        print(USAGE)
        return 0
    raise ConfigError(_other_command(command))


def _is_help(words: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") or word.startswith("--help=") for word in words)


def _refuse_rival() -> None:
    try:
        version = importlib.metadata.version(RIVAL)
    except importlib.metadata.PackageNotFoundError:
        return
    raise PluginError(
        f"{RIVAL} {version} is installed beside omni-core, and both have the package 'vllm_omni' that vLLM looks for; "
        f"uninstall one of them (pip uninstall {RIVAL}, then reinstall omni-core), or use: omni serve MODEL"
    )


def _other_command(command: str | None) -> str:
    if command is None:
        return "--omni goes with 'serve': vllm serve MODEL --omni"
    without = {
        "bench": "run 'omni bench video' or 'omni bench speech', for token models 'vllm bench' without --omni",
        "chat": "run 'vllm chat' without --omni",
        "complete": "run 'vllm complete' without --omni",
        "collect-env": "run 'omni doctor', or 'vllm collect-env' without --omni",
    }
    hint = without.get(command, f"run 'vllm {command}' without --omni")
    return f"--omni goes with 'serve', and Omni has no command {command!r}: {hint}"
