"""``omni serve MODEL`` and ``vllm serve MODEL --omni``: checks, configuration, then the server.

What can be wrong is checked from the cheapest to the dearest: plugins and versions, the checkpoint's family, the
deploy file and the names of stages, and only then vLLM is imported to parse its own flags and to find the platform.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_core.cli.options import OWN_NAMES, add_options, merge_options, take_options
from omni_core.errors import ConfigError

if TYPE_CHECKING:
    from omni_core.config import Explicit
    from omni_core.config.startup import Matched
    from omni_core.vllm.arguments import ParsedServe, ServeParser

NO_MODEL = "which model? Give a folder or a hub id: omni serve MODEL"


def run(argv: Sequence[str], program: str) -> int:
    """Serve, or do what ``--help`` or ``--print-config`` ask for.

    Args:
        argv: what follows ``serve`` on the command line.
        program: how help calls the command, ``omni serve`` or ``vllm serve``.

    Raises:
        OmniError: for anything that is wrong with plugins, checkpoint, flags or files.
        SystemExit: after ``--help``, as argparse does.
    """
    # As vLLM's own command does; and what is printed for programs stays free of log lines.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    own, rest = take_options(argv)
    if "print_config" in own:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    matched = None if _wants_help(rest) else _check_early(own, rest)

    from omni_core.vllm.arguments import ServeParser, resolve_for_vllm

    parser = ServeParser(program, add_options)
    parsed = parser.parse(rest)
    options = merge_options({name: v for name, v in parsed.explicit_values().items() if name in _own_names()}, own)
    matched = _match(parsed, options, matched)
    resolved = resolve_for_vllm(matched, _explicit(options, parsed.explicit_values()))
    if options.get("print_config"):
        from omni_core.config import show

        sys.stdout.write(show.to_json(resolved) if options["print_config"] == "json" else show.to_text(resolved))
        return 0
    for warning in resolved.warnings:
        print(f"omni: warning: {warning}", file=sys.stderr)
    _serve(parser, parsed, resolved)
    return 0


def _wants_help(rest: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") or word.startswith("--help=") for word in rest)


def _own_names() -> tuple[str, ...]:
    from omni_core.config.server import server_settings

    return (*OWN_NAMES, *server_settings())


def _check_early(own: Mapping[str, Any], rest: Sequence[str]) -> Matched | None:
    """Every check that does not need vLLM; the family of the model where the command line starts with the model."""
    from omni_core.config.resolve import check_stages
    from omni_core.config.startup import check_versions, match

    check_versions(allow_version_mismatch=own.get("allow_version_mismatch", False))
    explicit = _explicit(own, {})
    if not rest:
        raise ConfigError(NO_MODEL)
    if rest[0].startswith("-"):
        return None
    matched = match(rest[0], _revision(rest))
    check_stages(explicit, matched.pipeline)
    return matched


def _revision(rest: Sequence[str]) -> str | None:
    """The value of ``--revision``, as the full parser will find it; an abbreviation is found only there."""
    found = None
    for word, following in zip(rest, [*rest[1:], ""], strict=True):
        if word == "--revision":
            found = following
        elif word.startswith("--revision="):
            found = word.partition("=")[2]
    return found


def _match(parsed: ParsedServe, options: Mapping[str, Any], early: Matched | None) -> Matched:
    """The family of the model that was parsed in the end, where it is not the one that was found early."""
    from omni_core.config.startup import check_versions, match

    arguments = parsed.namespace
    if not {"model_tag", "model"} & parsed.explicit:
        raise ConfigError(NO_MODEL)
    if early is not None and (early.checkpoint.source, early.checkpoint.revision) == (
        arguments.model,
        arguments.revision,
    ):
        return early
    check_versions(allow_version_mismatch=options.get("allow_version_mismatch", False))
    return match(arguments.model, arguments.revision)


def _explicit(options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Explicit:
    """What the user asked for, from Omni's options and vLLM's arguments."""
    from pathlib import Path

    from omni_core.config import Explicit
    from omni_core.config.deploy import Deploy, override_from_text, read_deploy
    from omni_core.config.server import server_settings

    return Explicit(
        arguments={name: value for name, value in arguments.items() if name not in _own_names()},
        overrides=[override_from_text(text) for text in options.get("overrides", ())],
        deploy=read_deploy(Path(options["deploy"])) if "deploy" in options else Deploy(),
        server={name: options[name] for name in server_settings() if name in options},
    )


def _serve(parser: ServeParser, parsed: ParsedServe, resolved: Any) -> None:
    parser.validate(parsed.namespace)

    from omni_core.vllm.server import serve

    serve(resolved, parsed.namespace)
