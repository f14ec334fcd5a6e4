"""Every flag that the documentation mentions is one that the command has."""

import argparse
import re
from pathlib import Path

import pytest

from omni_core.cli import main
from omni_core.cli.options import add_options
from omni_core.vllm.arguments import ServeParser

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "plugins").glob("*/*/README.md"))]
COMMAND = re.compile(r"\b(omni|vllm)\s+(serve|plugins|doctor|new|bench(?:\s+(?:video|speech))?)\b")
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*")
OTHER_COMMANDS = re.compile(r"^\W*(pip|uv|git|python3?|pytest|ruff|mypy|curl|docker|scripts/\w+)\b")


def flags_in(text):
    """``(command or None, flag)`` for each flag in code: in commands of ours, and alone between backticks."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    for line in lines + re.findall(r"`([^`\n]+)`", prose):
        line = line.split(" #")[0]
        command = COMMAND.search(line)
        if command:
            yield from ((" ".join(command[2].split()), flag) for flag in FLAG.findall(line[command.end() :]))
        elif line.startswith("--") and not OTHER_COMMANDS.match(line):
            yield from ((None, flag) for flag in FLAG.findall(line)[:1])


@pytest.fixture(scope="module")
def options():
    """The flags of each command; those that take a group's name as value too."""
    parser = main._parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    known = {name: set(sub._option_string_actions) for name, sub in commands.choices.items()}
    [kinds] = [a for a in commands.choices["bench"]._actions if isinstance(a, argparse._SubParsersAction)]
    known |= {f"bench {name}": set(sub._option_string_actions) for name, sub in kinds.choices.items()}
    known["serve"] = set(ServeParser("omni serve", add_options).serve._option_string_actions)
    known[None] = set().union(*known.values()) | {"--version"}
    return known


def unknown_flags(text, options):
    return [
        (command, flag)
        for command, flag in flags_in(text)
        if flag.split(".")[0].replace("_", "-") not in options.get(command, ()) and flag not in options.get(command, ())
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_in_the_documentation_exists(page, options):
    assert unknown_flags(page.read_text(encoding="utf-8"), options) == []


def test_the_check_finds_what_does_not_exist(options):
    text = """
    Use `--stage-configs-path`, not `--deploy FILE`; `pip install --no-deps x` is another matter, as is `-tp`.

```bash
omni serve M --stage-0-devices 0 --set diffusion.dtype=auto \\
    --profiler-config.profiler torch -tp 2 --print-config=json  # --not-a-flag here
vllm serve M --omni --max_num_seqs 2
omni plugins --yaml
omni bench video --size 64x32 --voice a
omni bench speech --voice a --size 64x32
pip install --upgrade omni-core
```
""".replace("    Use", "Use")

    assert unknown_flags(text, options) == [
        ("serve", "--stage-0-devices"), ("plugins", "--yaml"), ("bench video", "--voice"),
        ("bench speech", "--size"), (None, "--stage-configs-path"),
    ]  # fmt: skip
