#!/usr/bin/env python3
"""Write the generated parts of the Markdown pages from the code; with --check, only compare.

A generated part stands between ``<!-- generated: NAME ARGUMENT -->`` and ``<!-- end -->``; PARTS has the names.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "models" / "wan22")]

from omni_core.cli.bench import add_options as add_bench_options  # noqa: E402
from omni_core.cli.options import add_options  # noqa: E402
from omni_core.config import arguments_table  # noqa: E402
from omni_core.config.features import FEATURES  # noqa: E402
from omni_core.config.model import ServerConfig  # noqa: E402
from omni_core.config.resolve import as_flag  # noqa: E402
from omni_core.config.server import server_settings  # noqa: E402
from omni_core.http.jobs import VideoJob  # noqa: E402
from omni_core.http.metrics import StageCollector  # noqa: E402
from omni_core.http.speech import speech_router  # noqa: E402
from omni_core.http.speech_bodies import Delivery, VoiceUpload, client_fields  # noqa: E402
from omni_core.http.speech_declared import HEADERS  # noqa: E402
from omni_core.http.stages import stage_router  # noqa: E402
from omni_core.http.videos import video_router  # noqa: E402
from omni_core.http.voices import StoredVoice  # noqa: E402
from omni_core.plugins import hookspecs  # noqa: E402
from omni_core.requests import VideoRequest, describe_field  # noqa: E402
from omni_core.runtime import RequestRecord  # noqa: E402
from omni_core.speech.requests import SpeechRequest  # noqa: E402
from omni_core.stages import SupervisedDiffusion  # noqa: E402
from omni_core.supervisor import StageState  # noqa: E402
from omni_plugin_wan22.request import MAX_AREA  # noqa: E402
from omni_plugin_wan22.request import request as wan_request  # noqa: E402

PART = re.compile(r"(<!-- generated: (\S+)(?: ([^\n]*?))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class WanFiles:
    """The configuration files of a Wan checkpoint; ``shift`` and ``boundary`` are what tells two of them apart."""

    def __init__(self, *, shift: float, boundary: float | None, first_frame: bool = False) -> None:
        channels, scale = (48, 16) if first_frame else (16, 8)
        transformer = {"patch_size": [1, 2, 2], "in_channels": channels, "rope_max_seq_len": 1024}
        scheduler = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}
        self.files: Mapping[str, Mapping[str, Any]] = {
            "model_index.json": {
                "_class_name": "WanPipeline", "boundary_ratio": boundary, "expand_timesteps": first_frame,
            },
            "text_encoder/config.json": {"model_type": "umt5"},
            "tokenizer/tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"},
            "transformer/config.json": transformer,
            "transformer_2/config.json": transformer,
            "vae/config.json": {"z_dim": channels, "scale_factor_temporal": 4, "scale_factor_spatial": scale},
            "scheduler/scheduler_config.json": {
                **scheduler, "prediction_type": "flow_prediction", "flow_shift": shift,
            },
        }  # fmt: skip

    def read(self, file: str) -> Mapping[str, Any]:
        return self.files.get(file, {})


def wan_request_model(*, experts: int, shift: float = 3.0, boundary: float = 0.875) -> type[VideoRequest]:
    """The request model of a genuine Wan checkpoint, as far as its configuration decides it."""
    return wan_request(WanFiles(shift=shift, boundary=boundary if experts == 2 else None))  # type: ignore[arg-type]


def wan_image_request_model() -> type[VideoRequest]:
    """The request model of TI2V 5B, which takes a first frame."""
    return wan_request(WanFiles(shift=5.0, boundary=None, first_frame=True))  # type: ignore[arg-type]


def wan22_request(argument: str) -> str:
    """Every field of a request to Wan, for two experts with what differs for one."""
    two, other = wan_request_model(experts=2), wan_request_model(experts=2, shift=5.0, boundary=0.9)
    one = wan_request_model(experts=1)
    rows = []
    for name, field in two.model_fields.items():
        allowed, default = _allowed(two, name), _default(two, name)
        if default != _default(other, name):
            default = "the checkpoint's"
        if name not in one.model_fields:
            allowed += "; two experts only"
        elif _default(one, name) != _default(two, name) and default != "the checkpoint's":
            default += f" (one expert: {_default(one, name)})"
        rows.append((f"`{name}`", allowed, default, field.description or ""))
    area = f"\n`width` x `height` is at most {MAX_AREA} pixels.\n"
    return table(("field", "allowed", "default", "meaning"), rows) + area


def _allowed(model: type[BaseModel], name: str) -> str:
    text = re.sub(r"; default .*$", "", describe_field(model, name))
    return text.replace("9223372036854775807", "2^63 - 1")


def _default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return {None: "none", "": "empty"}.get(field.default, f"{field.default}")


def routes(argument: str) -> str:
    """The routes of the videos API (``videos``), of speech (``speech``) or those about the stages (``stages``)."""
    if argument == "stages":
        router = stage_router({})  # type: ignore[arg-type]
    elif argument == "speech":
        engine = SimpleNamespace(request_model=SpeechRequest)
        service = SimpleNamespace(engine=engine, models=["model"], max_batch_items=ServerConfig().max_batch_items)
        router = speech_router(service)  # type: ignore[arg-type]
    else:
        engine = SimpleNamespace(request_model=VideoRequest)
        router = video_router(SimpleNamespace(engine=engine, models=["model"]))  # type: ignore[arg-type]
    rows = [
        (f"`{method} {route.path}`", inspect.cleandoc(route.endpoint.__doc__ or ""))  # type: ignore[attr-defined]
        for route in router.routes
        for method in sorted(getattr(route, "methods", None) or {"WebSocket"})
    ]
    return table(("route", "what it does"), rows)


def speech_request(argument: str) -> str:
    """Every field that a request for speech has, whatever the model."""
    return _field_table((SpeechRequest, Delivery), client_fields(SpeechRequest, Delivery))


def voice_upload(argument: str) -> str:
    """The fields of an uploaded voice beside the sample."""
    return _field_table((VoiceUpload,), tuple(VoiceUpload.model_fields))


def _field_table(models: tuple[type[BaseModel], ...], names: tuple[str, ...]) -> str:
    rows = []
    for model in models:
        for name in names:
            if name in model.model_fields:
                allowed = _allowed(model, name).replace("4611686018427387903", "2^62 - 1")
                rows.append((f"`{name}`", allowed, _default(model, name), model.model_fields[name].description or ""))
    return table(("field", "allowed", "default", "meaning"), rows)


def speech_headers(argument: str) -> str:
    """Headers of an answer with sound."""
    return table(("header of the answer", "meaning"), [(f"`{name}`", text) for name, text in HEADERS.items()])


def voice(argument: str) -> str:
    """The fields of an uploaded voice."""
    meanings = attributes(StoredVoice)
    fields = [field.name for field in dataclasses.fields(StoredVoice)]
    return table(("field", "meaning"), [(f"`{name}`", _sentence(meanings[name])) for name in fields])


def metrics(argument: str) -> str:
    """Omni's own Prometheus metrics, collected from a stage that has done one thing of each kind."""
    totals = {"forwards": {"1": 1}, "seconds": {"denoise": 1.0}}
    stage = SupervisedDiffusion.__new__(SupervisedDiffusion)
    stage.stage, stage.state, stage.restarts, stage.totals = "diffusion", StageState.RUNNING, 0, totals
    engine = SimpleNamespace(active=0, running=0, ended={"done": 1})
    collector = StageCollector({stage.stage: stage}, engine)  # type: ignore[arg-type]
    engine.on_end(RequestRecord("done", {"queue": 1.0}))
    rows = []
    for metric in collector.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = [label for label in metric.samples[0].labels if label != "le"]
        rows.append((f"`{name}`", metric.type, ", ".join(f"`{label}`" for label in labels), metric.documentation))
    return table(("metric", "kind", "labels", "meaning"), rows)


def job(argument: str) -> str:
    """The fields of a video job."""
    meanings = attributes(VideoJob)
    sent = VideoJob("id", "model", "prompt", "1x1", "1", 0, 0).to_json()
    return table(("field", "meaning"), [(f"`{name}`", _sentence(meanings[name])) for name in sent])


def server_table(argument: str) -> str:
    """Omni's own server settings."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    metavars = {action.dest: (action.option_strings[0], action.metavar) for action in parser._actions}
    meanings, defaults = attributes(ServerConfig), ServerConfig()
    rows = []
    for name in server_settings():
        flag, metavar = metavars[name]
        value = getattr(defaults, name)
        default = {None: "none", (): "none"}.get(value, f"{value}")
        rows.append((f"`{flag} {metavar}`", f"`{name}`", default, _sentence(meanings[name])))
    return table(("flag", "key in a deploy file", "default", "meaning"), rows)


def own_options(argument: str) -> str:
    """Omni's options of ``serve`` that are not server settings."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    rows = []
    for action in parser._actions:
        if action.dest not in server_settings():
            choices = "[=text\\|json]" if action.choices else f" {action.metavar}" if action.metavar else ""
            rows.append((f"`{action.option_strings[0]}{choices}`", action.help or ""))
    return table(("flag", "meaning"), rows)


def bench_options(argument: str) -> str:
    """The options of ``omni bench video`` or ``omni bench speech``."""
    parser = argparse.ArgumentParser(add_help=False)
    add_bench_options(parser, argument)
    rows = []
    for action in parser._actions:
        value = "\\|".join(action.choices) if action.choices else action.metavar
        more = " ..." if action.nargs == "+" else ""
        flag = f"`{action.option_strings[0]}{f' {value}{more}' if value else ''}`"
        default = "" if action.default in (None, False, []) else f"`{action.default}`"
        rows.append((flag, default, action.help or ""))
    return table(("option", "default", "meaning"), rows)


def engine_arguments(argument: str) -> str:
    """Engine arguments that a diffusion stage takes."""
    names = sorted(arguments_table.DIFFUSION)
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False) + "\n"


def fixed_arguments(argument: str) -> str:
    """Arguments that have one possible value."""
    rows = [
        (f"`{as_flag(name)}`", "null" if value is None else str(value).lower(), reason)
        for name, (value, reason) in sorted(arguments_table.FIXED.items())
    ]
    return table(("flag", "only value", "why"), rows)


def features(argument: str) -> str:
    """The features that a family's table of combinations can speak of."""
    return ", ".join(f"`{name}`" for name in sorted(FEATURES)) + "\n"


def hooks(argument: str) -> str:
    """Every hook of the plugin surface."""
    rows = []
    for name, function in vars(hookspecs).items():
        if name.startswith("omni_"):
            summary = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            rows.append((f"`{name}()`", f"`{function.__annotations__['return']}`", summary))
    return table(("hook", "gives", "what"), rows)


def code(argument: str) -> str:
    """A file, or one definition (``Class.method``) of a file, as it is."""
    path, _, wanted = argument.partition(" ")
    text = (ROOT / path).read_text(encoding="utf-8")
    if wanted:
        text = _definition(text, wanted)
    language = {".py": "python", ".toml": "toml"}[Path(path).suffix]
    return f"```{language}\n{text.strip()}\n```\n"


def _definition(text: str, wanted: str) -> str:
    body: list[ast.stmt] = ast.parse(text).body
    for name in wanted.split("."):
        node = next(n for n in body if getattr(n, "name", None) == name)
        body = getattr(node, "body", [])
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def attributes(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each of its fields."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", section, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.replace("``", "`").split()))
    unknown = set(found) - {field.name for field in dataclasses.fields(kind)}
    assert not unknown, f"{kind.__name__} describes {unknown}, which it does not have"
    return found


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


PARTS: Mapping[str, Callable[[str], str]] = {
    "bench-options": bench_options,
    "code": code,
    "engine-arguments": engine_arguments,
    "features": features,
    "fixed-arguments": fixed_arguments,
    "hooks": hooks,
    "job": job,
    "metrics": metrics,
    "options": own_options,
    "routes": routes,
    "server-settings": server_table,
    "speech-headers": speech_headers,
    "speech-request": speech_request,
    "voice": voice,
    "voice-upload": voice_upload,
    "wan22-request": wan22_request,
}


def pages() -> Iterator[Path]:
    """Every page that may have generated parts."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
    yield from sorted((ROOT / "plugins").glob("*/*/README.md"))


def render(text: str) -> str:
    """A page with its generated parts written anew."""
    return PART.sub(lambda m: m[1] + PARTS[m[2]](m[3] or "") + m[5], text)


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not up to date")
    arguments = parser.parse_args()
    status = 0
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = render(before)
        if after == before:
            continue
        if arguments.check:
            print(f"{page.relative_to(ROOT)} is out of date; run scripts/generate_docs.py", file=sys.stderr)
            status = 1
        else:
            page.write_text(after, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
