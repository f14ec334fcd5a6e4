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


@dataclass(frozen=True, order=True)
class Contact:
    """A symbol of vLLM and the files that use it."""

    symbol: str
    files: tuple[str, ...]


def has_prefix(symbol: str, prefix: str) -> bool:
    """Whether ``symbol`` is ``prefix`` or lies under it."""
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
        if isinstance(node, ast.ImportFrom) and node.module and has_prefix(node.module, "vllm") and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if has_prefix(alias.name, "vllm"))
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
