"""vLLM's own argument parsing: the parser of ``serve``, the engine arguments, and which flags the user gave.

Only what is the same in every vLLM that is supported is used: ``cmd_init()[0].subparser_init`` for the parser (the
modules behind it moved in 0.33), ``FlexibleArgumentParser`` and the fields of ``AsyncEngineArgs``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import cmd_init
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from omni_core.config import EngineArgument, Explicit, Resolved, as_argument, resolve
from omni_core.config.deploy import Deploy, override_from_item, read_deploy
from omni_core.config.startup import Matched, check_versions, match
from omni_core.config.values import unknown
from omni_core.errors import ConfigError, MissingPlugin
from omni_core.plugins.manager import get_manager

API_SERVER_SETTINGS = ("max_queued_requests",)
"""Omni's server settings that mean something without a server."""


@cache
def engine_arguments() -> Mapping[str, EngineArgument]:
    """Every engine argument of the installed vLLM, with its default and type."""
    fields = [f for f in dataclasses.fields(AsyncEngineArgs) if f.init and not f.name.startswith("_")]
    return {f.name: EngineArgument(f.name, _default(f), Any if isinstance(f.type, str) else f.type) for f in fields}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def resolve_for_vllm(matched: Matched, explicit: Explicit) -> Resolved:
    """Resolve with the installed vLLM's engine arguments, on the platform that it runs on.

    Raises:
        MissingPlugin: no plugin for the platform that vLLM found, or it found none.
        ConfigError, PluginError: see ``omni_core.config.resolve``.
    """
    from vllm.platforms import current_platform

    device_type = current_platform.device_type
    if not device_type:
        raise MissingPlugin("vLLM finds no device that it can run on; run: omni doctor")
    served, manager = matched.on(device_type), get_manager()
    return resolve(
        served,
        explicit,
        engine_arguments(),
        require_attention=lambda name: manager.require(manager.attention_backend(name, device_type)),
        require_routes=lambda name: manager.require(manager.http_routes(name)),
    )


def resolve_for_api(
    model: str,
    *,
    deploy: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    allow_version_mismatch: bool = False,
    engine: Mapping[str, Any] | None = None,
) -> Resolved:
    """Resolve what the Python API was given: as ``omni serve`` does, with keyword arguments in place of flags.

    Args:
        model: local folder or hub id of a checkpoint.
        deploy: a deploy file.
        overrides: ``{"stage.key": value}``.
        allow_version_mismatch: let version mismatches through.
        engine: engine arguments by vLLM's names, ``revision``, and ``max_queued_requests``.

    Raises:
        OmniError: for anything that is wrong with the arguments, the checkpoint or the plugins.
    """
    check_versions(allow_version_mismatch=allow_version_mismatch)
    arguments = dict(engine or {})
    server = {name: arguments.pop(name) for name in API_SERVER_SETTINGS if name in arguments}
    for name in arguments:
        if name not in engine_arguments() or name == "model":
            raise ConfigError(unknown("argument", name, [*engine_arguments(), *API_SERVER_SETTINGS]))
    explicit = Explicit(
        arguments=arguments,
        overrides=[override_from_item(target, value) for target, value in (overrides or {}).items()],
        deploy=Deploy() if deploy is None else read_deploy(Path(deploy)),
        server=server,
        spell=as_argument,
    )
    return resolve_for_vllm(match(model, arguments.get("revision")), explicit)


@dataclass(frozen=True)
class ParsedServe:
    """A parsed ``serve`` command line.

    Attributes:
        namespace: every argument, as vLLM's own ``serve`` gets it, with ours.
        explicit: names of the arguments that the user gave, be it with the default value, on the command line or in
            the file of ``--config``.
    """

    namespace: argparse.Namespace
    explicit: frozenset[str]

    def explicit_values(self) -> dict[str, Any]:
        """The arguments that the user gave."""
        return {name: getattr(self.namespace, name) for name in sorted(self.explicit)}


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, which raises instead of exiting and remembers what it parsed in the end.

    By then ``FlexibleArgumentParser.parse_args`` has unfolded ``--config`` files, dashes and dotted JSON keys.
    """

    unfolded: Sequence[str] = ()

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.unfolded = list(args or ())
        result: tuple[argparse.Namespace, list[str]] = super().parse_known_args(args, namespace)
        return result

    def load_config_file(self, file_path: str) -> list[str]:
        try:
            words: list[str] = super().load_config_file(file_path)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read --config file {file_path}: {' '.join(str(error).split())}") from None
        except AttributeError:
            raise ConfigError(f"--config file {file_path} must be a mapping of flags to values") from None
        return words

    def format_help(self) -> str:
        """vLLM's help (a list of groups, or what ``--help=WORD`` asks for), with our own options in full before it."""
        text: str = super().format_help()
        groups = "Config Groups:"
        if self._search_keyword is not None or groups not in text:
            return text
        formatter = self._get_formatter()
        for group in self._action_groups[:1]:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return text.replace(groups, f"{formatter.format_help()}\n{groups}", 1)

    def error(self, message: str) -> NoReturn:
        flag = next((word for word in message.partition("unrecognized arguments: ")[2].split() if word[:2] == "--"), "")
        if flag:
            name = flag.partition("=")[0]
            raise ConfigError(unknown("flag", name, [o for o in self._option_string_actions if o[:2] == "--"]))
        if "expected" in message and "argument" in message:
            message += " (a value that begins with '-' is written --flag=value)"
        raise ConfigError(message)


class ServeParser:
    """The parser of ``serve``: vLLM's arguments and ours.

    Args:
        program: what help calls the command: ``omni serve`` or ``vllm serve``.
        add_ours: adds our arguments to the group that help shows first.
    """

    def __init__(self, program: str, add_ours: Callable[[argparse._ArgumentGroup], None]) -> None:
        self._command = cmd_init()[0]
        # Taken from under vLLM's root parser, which does not know the flags that a --config file switches off.
        self.serve: _Parser = self._command.subparser_init(_Parser().add_subparsers())
        self.serve.prog = program
        self.serve.usage = f"{program} MODEL [options]"
        self.serve.epilog = (self.serve.epilog or "").replace("vllm serve", program)
        self.serve.description = "Serve a model of any modality over HTTP; vLLM's own options are in the other groups."
        group = self.serve.add_argument_group("Omni", "Options of Omni; the groups after it are vLLM's.")
        add_ours(group)
        self.serve._action_groups.remove(group)
        self.serve._action_groups.insert(0, group)

    def parse(self, argv: Sequence[str]) -> ParsedServe:
        """Parse what follows ``serve``. Prints and exits where help is asked for, as argparse does.

        Raises:
            ConfigError: unknown flag (with the nearest), wrong value, unreadable ``--config`` file.
        """
        try:
            namespace = self.serve.parse_args(_split_config(argv))
            with self._defaults_suppressed():
                given = argparse.ArgumentParser.parse_known_args(self.serve, self.serve.unfolded)[0]
        except (ValueError, AssertionError) as error:  # no, or more than one, --config file
            raise ConfigError(str(error)) from None
        except IndexError:  # vLLM looks for the value of a dotted flag without asking whether there is one
            raise ConfigError("a flag of the form --name.key is followed by its value") from None
        namespace.subparser = "serve"
        namespace.model = namespace.model_tag or namespace.model
        return ParsedServe(namespace, frozenset(vars(given)))

    def validate(self, namespace: argparse.Namespace) -> None:
        """vLLM's own check of the parsed arguments; applies its logging arguments too.

        Raises:
            ConfigError: two arguments do not go together.
        """
        configure_logging_from_args(namespace)
        try:
            self._command.validate(namespace)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(str(error)) from None

    @contextmanager
    def _defaults_suppressed(self) -> Iterator[None]:
        """While it lasts, parsing sets only what is given."""
        actions = list(self.serve._actions)
        before = [action.default for action in actions]
        preset, self.serve._defaults = self.serve._defaults, {}
        try:
            for action in actions:
                action.default = argparse.SUPPRESS
            yield
        finally:
            for action, default in zip(actions, before, strict=True):
                action.default = default
            self.serve._defaults = preset


def _split_config(argv: Sequence[str]) -> list[str]:
    """``--config=FILE`` as two words: vLLM reads the file only then, and ignores the other form."""
    words: list[str] = []
    for word in argv:
        words += ["--config", word.partition("=")[2]] if word.startswith("--config=") else [word]
    return words
