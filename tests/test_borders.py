"""The borders of the architecture, read from the source: who may name, import and contain what."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CORE = REPOSITORY / "omni_core"
PLUGINS = sorted(path.parent for path in REPOSITORY.glob("plugins/*/*/pyproject.toml"))
MAX_LINES = 500

FAMILIES = {"qwen", "qwen2", "qwen3", "wan", "wan2", "wan22", "minimax", "minicpm", "minicpmo", "hailuo"}
VENDORS = {"ascend", "npu", "xpu", "rocm", "musa", "nvidia", "amd", "intel", "huawei", "cuda"}
METHODS = {"fp8", "mxfp8", "nvfp4", "int8", "int4", "torchao", "gguf", "awq", "gptq", "bitsandbytes"}
FORBIDDEN = FAMILIES | VENDORS | METHODS

# Why a word may stand in a file of the core. It may only shrink or be explained.
ALLOWED: dict[str, set[str]] = {}


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


ALL_SOURCES = [*sources(CORE), *sources(REPOSITORY / "vllm_omni"), *(s for plugin in PLUGINS for s in sources(plugin))]


def words(text: str) -> set[str]:
    """The lower-case words of source text; ``QwenPipeline``, ``is_npu`` and ``wan2.2`` give up theirs."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return set(re.findall(r"[a-z]+\d*", split.lower()))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, and every module that a string in it names with an attribute."""
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            lazy = re.fullmatch(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*", node.value)
            if lazy:
                yield lazy.group(1)


def top_level(module: str) -> str:
    return module.partition(".")[0]


def test_words_are_found_however_they_are_written() -> None:
    found = words("class QwenPipeline: is_npu = 'wan2.2'; HTTP input torchao_config FP8Linear")
    assert {"qwen", "npu", "wan2", "torchao", "fp8"} <= found
    assert "npu" not in words("input")


@pytest.mark.parametrize("path", sources(CORE), ids=relative)
def test_the_core_names_no_family_vendor_or_quantization_method(path: Path) -> None:
    named = (words(path.read_text(encoding="utf-8")) | words(path.stem)) & FORBIDDEN
    assert named <= ALLOWED.get(relative(path), set())


@pytest.mark.parametrize("path", sources(CORE), ids=relative)
def test_the_core_imports_vllm_only_in_one_package(path: Path) -> None:
    if not path.is_relative_to(CORE / "vllm"):
        assert not [module for module in imports(path) if top_level(module) == "vllm"]


@pytest.mark.parametrize("path", sources(CORE), ids=relative)
def test_the_core_imports_no_plugin(path: Path) -> None:
    packages = {package for plugin in PLUGINS for package in packages_of(plugin)}
    assert not {top_level(module) for module in imports(path)} & packages


def packages_of(plugin: Path) -> set[str]:
    return {path.parent.name for path in plugin.glob("*/__init__.py")}


def dependencies_of(plugin: Path) -> set[str]:
    with (plugin / "pyproject.toml").open("rb") as file:
        lines = tomllib.load(file)["project"]["dependencies"]
    return {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in lines}


@pytest.mark.parametrize("plugin", PLUGINS, ids=relative)
def test_a_plugin_imports_another_only_if_its_metadata_depends_on_it(plugin: Path) -> None:
    others = {package for other in PLUGINS if other != plugin for package in packages_of(other)}
    imported = {top_level(module) for path in sources(plugin) for module in imports(path)}
    assert imported & others <= dependencies_of(plugin)


@pytest.mark.parametrize("path", ALL_SOURCES, ids=relative)
def test_a_module_says_what_it_is_for_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text or ast.get_docstring(ast.parse(text)), "the first line says what the module is for"
    assert text.count("\n") <= MAX_LINES
