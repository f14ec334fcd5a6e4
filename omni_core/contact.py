"""Which symbols of vLLM the core and the first-party plugins touch: read from the sources, without importing any.

``scripts/vllm_contact.py`` writes ``docs/vllm-contact.md`` from this, and ``omni doctor`` checks that the installed
vLLM has every symbol.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PUBLIC, SEMI_PUBLIC, PRIVATE = "public", "semi-public", "private"

# Longest prefix wins. Public: documented for users or plugin authors. Semi-public: an extension point or an interface
# that vLLM keeps on purpose, without a promise. Everything else is private.
_LEVELS = {
    "vllm.SamplingParams": (PUBLIC, "documented"),
    "vllm.ModelRegistry": (PUBLIC, "documented for plugins"),
    "vllm.sampling_params": (PUBLIC, "documented"),
    "vllm.engine.arg_utils.AsyncEngineArgs": (PUBLIC, "documented"),
    "vllm.config.VllmConfig": (PUBLIC, "documented"),
    "vllm.logger.init_logger": (PUBLIC, "documented"),
    "vllm.envs": (PUBLIC, "documented"),
    "vllm.platforms.current_platform": (PUBLIC, "documented for platform plugins"),
    "vllm.transformers_utils.config.register_config_parser": (PUBLIC, "documented for plugins"),
    "vllm.transformers_utils.config.get_config_parser": (PUBLIC, "documented for plugins"),
    "vllm.transformers_utils.config_parser_base": (PUBLIC, "documented for plugins"),
    "vllm.v1.engine.async_llm.AsyncLLM": (SEMI_PUBLIC, "the engine client of vLLM's own server"),
    "vllm.v1.engine.exceptions": (SEMI_PUBLIC, "what the engine client raises"),
    "vllm.inputs": (SEMI_PUBLIC, "inputs of the engine client"),
    "vllm.entrypoints": (SEMI_PUBLIC, "app and launcher of vLLM's own server"),
    "vllm.utils.argparse_utils": (SEMI_PUBLIC, "parser of vLLM's own command"),
    "vllm.v1.core.sched.interface": (SEMI_PUBLIC, "what scheduler_cls implements; declared not public"),
    "vllm.v1.worker.gpu_worker.Worker": (SEMI_PUBLIC, "what worker_cls subclasses; has a hook for the model runner"),
    "vllm.model_executor.layers.linear": (SEMI_PUBLIC, "layers that out-of-tree models are built from"),
    "vllm.distributed": (SEMI_PUBLIC, "collectives that out-of-tree models use"),
}


@dataclass(frozen=True, order=True)
class Contact:
    """A symbol of vLLM and the files that use it."""

    symbol: str
    files: tuple[str, ...]

    @property
    def level(self) -> tuple[str, str]:
        """How public the symbol is, and why."""
        best = max((prefix for prefix in _LEVELS if _has_prefix(self.symbol, prefix)), key=len, default=None)
        return _LEVELS[best] if best else (PRIVATE, "")


def _has_prefix(symbol: str, prefix: str) -> bool:
    return symbol == prefix or symbol.startswith(prefix + ".")


def vllm_contacts(*roots: Path) -> list[Contact]:
    """Every ``vllm`` symbol imported, or named in a string as ``"vllm.module.Class"``, under ``roots``."""
    found: dict[str, set[str]] = {}
    for root in roots:
        for path in sorted(set(root.rglob("*.py")) - {Path(__file__).resolve()}):
            for symbol in _symbols(ast.parse(path.read_text(), str(path))):
                found.setdefault(symbol, set()).add(path.relative_to(root.parent).as_posix())
    return [Contact(symbol, tuple(sorted(files))) for symbol, files in sorted(found.items())]


def _symbols(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _has_prefix(node.module, "vllm") and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _has_prefix(alias.name, "vllm"))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.[a-z_0-9]+)+\.[A-Z]\w+", str(node.value)):
            yield str(node.value)


def missing_symbols(contacts: list[Contact]) -> list[str]:
    """Symbols that the installed vLLM does not have. Imports vLLM."""
    from pkgutil import resolve_name

    missing = []
    for contact in contacts:
        module, _, name = contact.symbol.rpartition(".")
        try:
            resolve_name(f"{module}:{name}" if module else name)
        except (ImportError, AttributeError):
            missing.append(contact.symbol)
    return missing
