"""The command ``omni``: its subcommands, each imported when it is used, and how errors reach the user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import omni_core
from omni_core.errors import OmniError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``omni`` with ``argv`` (by default the process's own) and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(words))


def guarded(work: Callable[[], int]) -> int:
    """Run ``work``; an error that Omni raises on purpose becomes one line and its exit status."""
    try:
        return work()
    except OmniError as error:
        print(f"omni: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # keeps Python from complaining about the pipe once more at exit
        return 1


def _dispatch(words: Sequence[str]) -> int:
    if words[:1] == ["serve"]:  # vLLM's parser takes over, with hundreds of flags of its own
        from omni_core.cli import serve

        return serve.run(words[1:], "omni serve")
    parser = _parser()
    args = parser.parse_args(words)
    if args.version:
        print(versions())
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    from omni_core.cli import bench, doctor, plugins

    parser = argparse.ArgumentParser(prog="omni", description="Serve omni-modality models on stock vLLM.")
    parser.add_argument("-v", "--version", action="store_true", help="print the versions of omni-core and vLLM")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    subparsers.add_parser("serve", help="serve a model over HTTP (omni serve --help)", add_help=False)
    plugins.add_parser(subparsers)
    doctor.add_parser(subparsers)
    bench.add_parser(subparsers)
    return parser


def versions() -> str:
    """The versions of omni-core and of the vLLM that would be imported; nothing is imported to find out."""
    from omni_core.plugins.versions import find_vllm

    return f"omni-core {omni_core.__version__}\n{find_vllm() or 'vLLM is not installed'}"


if __name__ == "__main__":
    sys.exit(main())
