"""``omni bench``: put load on a server with OpenAI's videos or speech API and measure what a client sees."""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import omni_core
from omni_core.cli.plugins import print_table
from omni_core.errors import ConfigError, MissingPlugin

if TYPE_CHECKING:
    from omni_core.bench.client import Row, Target
    from omni_core.bench.report import TableRow
    from omni_core.bench.speech import Speech
    from omni_core.bench.workload import Workload
    from omni_core.cli.plugins import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add ``omni bench`` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="put load on a server and measure it",
        description="Put load on any server with OpenAI's videos or speech API, and measure what a client sees of it.",
    )
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for what, run in (("video", run_video), ("speech", run_speech)):
        kind = kinds.add_parser(what, help=f"a {what} API", description=f"Put load on a {what} API and measure it.")
        add_options(kind, what)
        kind.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options of ``omni bench video`` or ``omni bench speech``."""
    server = parser.add_argument_group("server")
    workload, measurement = parser.add_argument_group("workload"), parser.add_argument_group("measurement")
    _add_server(server)
    if what == "video":
        _add_video_server(server)
        _add_video(workload)
        _add_field(workload)
        _add_video_measurement(measurement)
    else:
        _add_speech(workload)
        _add_field(workload)
    add = measurement.add_argument
    more = "figures and a row for each request" if what == "video" else "a line of figures and rows for each run"
    add("--json", type=Path, metavar="FILE", help=f"Write {more}.")
    add("--allow-failures", action="store_true", help="Exit with 0 although requests failed.")


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="The server, with or without /v1.")
    add("--api-key", metavar="KEY", help="Sent as a bearer token; never written to a file.")
    add("--model", metavar="NAME", help="A served name; left out of the requests where absent.")
    add("--timeout", type=_positive, metavar="S", default=600.0, help="Seconds for one request, to its last byte.")


def _add_video_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mode", choices=("jobs", "sync"), default="jobs", help="Jobs that are polled, or /v1/videos/sync.")
    add("--body", choices=("form", "json"), default="form", help="How requests are sent: multipart form or JSON.")
    add(
        "--poll-interval",
        type=_positive,
        metavar="S",
        default=0.1,
        help="Seconds between two looks at a job, at least 0.05; latency and queue are measured that finely.",
    )


def _add_video(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-requests", type=_count, metavar="N", default=10, help="Requests in each run.")
    add(
        "--concurrency",
        type=_count,
        metavar="N",
        nargs="+",
        help="Most requests under way at once; several values: a run for each. 1, or no bound with --request-rate.",
    )
    add(
        "--request-rate",
        type=_rate,
        metavar="R",
        default=math.inf,
        help="Requests per second, Poisson; inf: as fast as --concurrency lets them go.",
    )
    add(
        "--size",
        metavar="WxH",
        nargs="+",
        action="extend",
        default=[],
        help="Width and height. Several are drawn in turn or, as in 832x480:3, by weight. Can be repeated.",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument("--num-frames", type=_count, metavar="N", help="Frames of each video.")
    length.add_argument("--seconds", type=_positive, metavar="S", help="Duration of each video.")
    add("--num-inference-steps", type=_count, metavar="N", help="Denoising steps of each request.")
    add("--prompt-file", type=Path, metavar="FILE", help="Prompts, one a line, used in turn.")
    add("--seed", type=int, metavar="N", help="Seed of the draws; request i asks for seed N+i. None is sent if absent.")


def _add_field(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--field",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="A further field of every request; the value is JSON, or else a string. Can be repeated.",
    )


def _add_speech(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--concurrency",
        type=_count,
        metavar="N",
        nargs="+",
        help="Streams, 1 where absent; several values: a run each.",
    )
    add("--rounds", type=_count, metavar="N", default=3, help="Requests that each stream sends, one after another.")
    add(
        "--spread",
        type=_at_least_0,
        metavar="S",
        default=0.0,
        help="Seconds that starts are spread over; all at once where absent.",
    )
    text = group.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="What to say; a few sentences in turn where absent.")
    text.add_argument("--texts", type=Path, metavar="FILE", help="Texts, one a line, used in turn.")
    add("--voice", metavar="NAME", help="A voice; left out of the requests where absent.")
    add("--sample-rate", type=_count, metavar="N", default=24000, help="Samples a second of the answers (s16le, mono).")
    add("--seed", type=int, metavar="N", help="Request i of a run asks for seed N+i. None is sent if absent.")
    add("--num-warmups", type=_whole, metavar="N", default=1, help="Rounds before each run that are not counted.")


def _add_video_measurement(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-warmups", type=_whole, metavar="N", default=1, help="Requests for each size before the first run.")
    add(
        "--check",
        type=_whole,
        metavar="N",
        default=2,
        help="Files of each size that are decoded after a run; the header of every file is looked at anyway.",
    )


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _positive(text: str) -> float:
    value = _rate(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be finite")
    return value


def _at_least_0(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 or more")
    return value


def _count(text: str) -> int:
    value = _whole(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 must be 1 or more")
    return value


def run_video(args: argparse.Namespace) -> int:
    """Measure and print. 0 if no request failed, or failures are allowed, else 1.

    Raises:
        ConfigError: an option has a wrong value.
        BenchError: the warm-up failed.
    """
    _require(args)
    from omni_core.bench.client import MIN_POLL_INTERVAL
    from omni_core.bench.load import measure
    from omni_core.bench.report import table, write_json

    if args.poll_interval < MIN_POLL_INTERVAL:
        raise ConfigError(f"--poll-interval {args.poll_interval:g} must be at least {MIN_POLL_INTERVAL:g} s")
    target = _target(args, mode=args.mode, body=args.body, poll_interval=args.poll_interval)
    workload = _workload(args)
    bounds = args.concurrency or ([None] if math.isfinite(args.request_rate) else [1])
    started_at = time.time()
    measuring = measure(
        target,
        workload,
        concurrency=bounds,
        warm_up=args.num_warmups,
        check_each=args.check,
        say=lambda line: print(line, file=sys.stderr),
    )
    runs = asyncio.run(measuring)
    if args.json is not None:
        asked = asdict(workload)
        if math.isinf(workload.request_rate):
            asked["request_rate"] = "inf"  # JSON has no number for it
        write_json(args.json, _about(target, asked, started_at), runs)
    return _finish(args, *table(runs), [row for run in runs for row in run.rows])


def run_speech(args: argparse.Namespace) -> int:
    """The same for speech."""
    _require(args)
    from omni_core.bench.report import write
    from omni_core.bench.speech import measure, table

    target, speech, started_at = _target(args), _speech(args), time.time()
    say = functools.partial(print, file=sys.stderr)
    runs = asyncio.run(measure(target, speech, args.concurrency or [1], say))
    if args.json is not None:
        about = _about(target, asdict(speech), started_at)
        write(args.json, "\n".join(json.dumps({**run.as_json(), **about}, allow_nan=False) for run in runs))
    return _finish(args, *table(runs), [row for run in runs for row in run.rows])


def _require(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("httpx") is None:
        raise MissingPlugin("omni bench needs httpx; run: pip install httpx")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.absolute().parent}")


def _target(args: argparse.Namespace, **more: Any) -> Target:
    import httpx

    from omni_core.bench.client import Target

    try:
        url = httpx.URL(args.base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url {args.base_url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--base-url {args.base_url!r} must look like http://HOST:PORT or https://HOST")
    return Target(args.base_url, args.api_key, timeout=args.timeout, **more)


def _workload(args: argparse.Namespace) -> Workload:
    from omni_core.bench.workload import PROMPTS, Workload, parse_field, parse_size, read_prompts

    fields: dict[str, Any] = dict(map(parse_field, args.field))
    return Workload(
        num_requests=args.num_requests,
        model=args.model,
        sizes=[parse_size(text) for text in args.size],
        num_frames=args.num_frames,
        seconds=args.seconds,
        num_inference_steps=args.num_inference_steps,
        fields=fields,
        prompts=PROMPTS if args.prompt_file is None else read_prompts(args.prompt_file),
        seed=args.seed,
        request_rate=args.request_rate,
    )


def _speech(args: argparse.Namespace) -> Speech:
    from omni_core.bench.speech import TEXTS, Speech
    from omni_core.bench.workload import parse_field, read_prompts

    texts = TEXTS if args.texts is None else read_prompts(args.texts, "--texts")
    return Speech(
        rounds=args.rounds,
        warm_up=args.num_warmups,
        spread=args.spread,
        sample_rate=args.sample_rate,
        texts=texts if args.text is None else [args.text],
        model=args.model,
        voice=args.voice,
        seed=args.seed,
        fields=dict(map(parse_field, args.field)),
    )


def _about(target: Target, workload: dict[str, Any], started_at: float) -> dict[str, Any]:
    """What was measured, for the JSON file: everything but the key."""
    server = {name: value for name, value in asdict(target).items() if name != "api_key"}
    return {"omni_core": omni_core.__version__, "started_at": started_at, "server": server, "workload": workload}


def _finish(args: argparse.Namespace, header: TableRow, lines: list[TableRow], rows: Iterable[Row]) -> int:
    """Print the table, and the failures if there are some, which also decide on the exit status."""
    from omni_core.bench.report import failures

    print_table(header, lines, "Nothing was measured.")
    failed = failures(rows)
    if failed:
        print_table(("failure", "requests", "the first says"), failed, "")
    return 1 if failed and not args.allow_failures else 0
