"""Omni's own options of ``serve``: one definition for the full parser and for the look before vLLM is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from omni_core.errors import ConfigError

OWN_NAMES = ("omni", "deploy", "overrides", "print_config", "allow_version_mismatch")
"""Names in the parsed arguments of what is neither vLLM's nor a server setting."""

_REPEATABLE = ("overrides", "allow_routes")


def add_options(group: Any) -> None:
    """Add Omni's options to a parser or an argument group; one that is not given leaves nothing in the namespace."""

    def add(*flags: str, **keywords: Any) -> None:
        group.add_argument(*flags, default=argparse.SUPPRESS, **keywords)

    add("--omni", action="store_true", help="Serve with Omni; `omni serve` implies it.")
    add("--deploy", metavar="FILE", help="Deploy file (YAML) with settings of stages and server.")
    add(
        "--set",
        dest="overrides",
        metavar="STAGE.KEY=VALUE",
        action="append",
        help="Set one key of one stage; VALUE is YAML or JSON. Can be repeated.",
    )
    add(
        "--print-config",
        nargs="?",
        const="text",
        choices=("text", "json"),
        help="Print every setting with where it came from, and exit.",
    )
    add(
        "--allow-version-mismatch",
        action="store_true",
        help="Start although version ranges do not admit what is installed.",
    )
    add(
        "--allow-routes",
        metavar="NAME",
        action="append",
        help="Mount the HTTP routes of this name that a plugin brings. Can be repeated.",
    )
    add("--max-queued-requests", type=int, metavar="N", help="How many requests may wait (64).")
    add(
        "--video-store",
        metavar="DIR",
        help="Folder of finished videos (a temporary folder that goes with the server).",
    )
    add("--video-ttl-seconds", type=int, metavar="N", help="How long a finished video is kept (3600).")
    add("--max-stored-videos", type=int, metavar="N", help="How many finished videos are kept (100).")
    add(
        "--voice-store",
        metavar="DIR",
        help="Folder of uploaded voices (a temporary folder that goes with the server).",
    )
    add("--max-stored-voices", type=int, metavar="N", help="How many uploaded voices are kept (1000).")
    add("--max-batch-items", type=int, metavar="N", help="How many items a batch of speech may have (32).")


class _OwnParser(argparse.ArgumentParser):
    """Knows only Omni's options, and raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def take_options(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split ``argv`` into Omni's options that are there, by name, and the words that are left for vLLM's parser.

    Raises:
        ConfigError: one of Omni's options has a wrong value.
    """
    parser = _OwnParser(add_help=False, allow_abbrev=False)
    add_options(parser)
    flags = parser._option_string_actions
    words = [_dashed(word) if _dashed(word).partition("=")[0] in flags else word for word in argv]
    namespace, rest = parser.parse_known_args(words)
    return vars(namespace), rest


def _dashed(word: str) -> str:
    """The word with dashes in the flag's name, as vLLM has it: ``--print_config`` is ``--print-config``."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def merge_options(from_file: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Options from the command line over those of a ``--config`` file; repeatable ones add up, the file's first."""
    both = {name: [*from_file[name], *own[name]] for name in _REPEATABLE if name in from_file and name in own}
    return {**from_file, **own, **both}
