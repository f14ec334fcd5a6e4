"""The documentation is true: generated parts, links, paths, code, commands, settings and requests of every page."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from omni_core import audio
from omni_core.checkpoint import Checkpoint
from omni_core.cli.options import OWN_NAMES, add_options, merge_options, take_options
from omni_core.config import Explicit, Served, resolve
from omni_core.config.deploy import override_from_text, read_deploy
from omni_core.config.server import server_settings
from omni_core.errors import RequestError
from omni_core.http import speech_answers, speech_socket
from omni_core.http.bodies import MAX_BODY_BYTES, MAX_IMAGE_BODY_BYTES, SHARED, to_request_values
from omni_core.http.errors import ERROR_TYPES, error_response
from omni_core.http.images import ALIASES, with_placeholders
from omni_core.http.jobs import VideoJob
from omni_core.http.speech_bodies import MAX_BATCH_BODY_BYTES, MAX_SPEECH_BODY_BYTES, Delivery
from omni_core.http.stages import SleepRequest
from omni_core.images import MAX_SIDE
from omni_core.plugins.declarations import ModelFamily, load_reference
from omni_core.plugins.loading import PluginEntry, load_plugin
from omni_core.requests import parse_request
from omni_core.speech.requests import SpeechRequest
from omni_core.supervisor import LAST_DELAY, StageState, SupervisedStage

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "examples" / "omni-plugin-noise")]

import generate_docs  # noqa: E402
import vllm_contact  # noqa: E402

PAGES = [page for page in generate_docs.pages() if page.name != "vllm-contact.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = "omni_core|vllm_omni|plugins|examples|benchmarks|tests|scripts|docs|constraints|dev"
PATH = re.compile(rf"(?<![\w/.<])((?:{FOLDERS})/[\w./-]*)")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def commands(page: Path) -> list[str]:
    """Every command line in the shell blocks of a page, without comments and with continued lines joined."""
    lines = []
    for block in blocks(page, "bash"):
        lines += re.sub(r"\\\n\s*", "", block).replace("\n       ", " ").splitlines()
    return [part.strip() for line in lines for part in line.split("&&") if part.strip()]


def cases(find) -> list:
    """One test case for each thing that ``find`` gives of a page."""
    return [
        pytest.param(found, id=f"{named(page)}-{index}") for page in PAGES for index, found in enumerate(find(page))
    ]


@pytest.mark.parametrize("script", [generate_docs, vllm_contact], ids=lambda script: script.__name__)
def test_generated_parts_are_up_to_date(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script.__name__, "--check"])
    assert script.main() == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "vllm-contact.md"], ids=named)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"\w+:", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_are_named_are_there(page):
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"))
    for path in PATH.findall(text):
        path = path.rstrip(".")
        assert list(ROOT.glob(path.removesuffix("/"))) or list(page.parent.glob(path)), path


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_name_in_our_packages_exists(page):
    """``omni_core.module`` and ``omni_core.module.name`` between backticks, and imports in Python blocks."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`(omni_(?:core|plugin_wan22)(?:\.\w+)+)`", text):
        if name != "omni_core.plugins":  # the group of entry points
            assert exists(name), name
    for tree in filter(None, map(parsed, blocks(page, "python"))):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("omni_"):
                for alias in node.names:
                    assert exists(f"{node.module}.{alias.name}"), f"{node.module}.{alias.name}"


def exists(name: str) -> bool:
    """Whether a module, or a name at the top of a module, is in the sources; nothing is imported."""
    roots = [ROOT, ROOT / "plugins/models/wan22", ROOT / "plugins/platforms/cuda", ROOT / "plugins/platforms/cpu"]
    roots.append(ROOT / "examples" / "omni-plugin-noise")
    parts = name.split(".")
    for root in roots:
        if root.joinpath(*parts).is_dir() or root.joinpath(*parts).with_suffix(".py").is_file():
            return True
        owner = root.joinpath(*parts[:-1])
        for file in (owner.with_suffix(".py"), owner / "__init__.py"):
            if file.is_file() and re.search(rf"\b{parts[-1]}\b", file.read_text(encoding="utf-8")):
                return True
    return False


@pytest.mark.parametrize("code", cases(lambda page: blocks(page, "python")))
def test_python_compiles(code):
    compile(code, "block", "exec", dont_inherit=True)


@pytest.mark.parametrize("text", cases(lambda page: blocks(page, "json")))
def test_json_is_json(text):
    json.loads(text)


# Commands and settings


class Pages:
    """A checkpoint of ``generate_docs``, as the resolution of configuration sees it."""

    source, revision = "MODEL", None

    def __init__(self, files: generate_docs.WanFiles) -> None:
        self.read = files.read


def wan() -> Pages:
    return Pages(generate_docs.WanFiles(shift=3.0, boundary=0.875))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """``served(MODEL)``: what serves it, the example for a name with ``noise`` in it and else Wan, on the CPU."""
    noise = tmp_path_factory.mktemp("docs") / "noise-checkpoint"
    noise.mkdir()
    (noise / "model_index.json").write_text('{"_class_name": "NoisePipeline"}')

    def declared(name, module):
        return load_plugin(PluginEntry(name, module, name, "0.1.0")).declarations

    [platform, *_] = declared("cpu", "omni_platform_cpu.plugin")

    def of(model):
        is_noise = "noise" in model
        module = "omni_plugin_noise.plugin" if is_noise else "omni_plugin_wan22.plugin"
        [family] = [d for d in declared("family", module) if isinstance(d, ModelFamily)]
        checkpoint = Checkpoint(noise) if is_noise else wan()
        return Served(checkpoint, family, platform, load_reference(family.pipeline)(checkpoint))

    return of


@pytest.fixture(scope="module")
def parser():
    from omni_core.vllm.arguments import ServeParser

    return ServeParser("omni serve", add_options)


def serve_commands(page):
    """What follows ``serve`` in ``omni serve ...`` and ``vllm serve ... --omni``."""
    for command in commands(page):
        words = shlex.split(command, comments=True)
        if words[:2] == ["omni", "serve"] or (words[:2] == ["vllm", "serve"] and "--omni" in words):
            yield words[2:]


@pytest.mark.parametrize("words", cases(serve_commands))
def test_a_command_that_serves_is_understood(words, parser, served):
    from omni_core.vllm.arguments import engine_arguments

    own, rest = take_options(words)
    parsed = parser.parse(rest)
    names = {*OWN_NAMES, *server_settings()}
    values = parsed.explicit_values()
    options = merge_options({name: value for name, value in values.items() if name in names}, own)
    explicit = Explicit(
        arguments={name: value for name, value in values.items() if name not in names},
        overrides=[override_from_text(text) for text in options.get("overrides", ())],
        server={name: options[name] for name in server_settings() if name in options},
    )
    resolve(served(parsed.namespace.model), explicit, engine_arguments())


def other_commands(page):
    for command in commands(page):
        words = shlex.split(command, comments=True)
        if words[:1] == ["omni"] and words[1] != "serve":
            yield words[1:]


@pytest.mark.parametrize("words", cases(other_commands))
def test_any_other_command_is_understood(words):
    from omni_core.cli.main import _parser

    _parser().parse_args(words)


@pytest.mark.parametrize("text", cases(lambda page: blocks(page, "yaml")))
def test_a_deploy_file_configures(text, tmp_path, served):
    from omni_core.vllm.arguments import engine_arguments

    file = tmp_path / "deploy.yaml"
    file.write_text(text)
    assert yaml.safe_load(text)
    resolve(served("MODEL"), Explicit(deploy=read_deploy(file)), engine_arguments())


# Requests


def curl_bodies(page):
    """``(JSON text or form fields, are they for the example)`` of each ``curl`` that asks for a video."""
    for command in commands(page):
        words = shlex.split(command)
        if words[0] != "curl" or not re.search(r"/v1/videos(/sync)?$", words[1]):
            continue
        form = [value for flag, value in pairwise(words) if flag == "-F"]
        data = [value for flag, value in pairwise(words) if flag == "-d"]
        yield data[0] if data else dict(item.split("=", 1) for item in form), "noise" in command


@pytest.mark.parametrize("body", cases(curl_bodies))
def test_a_body_that_is_shown_is_valid(body):
    fields, is_noise = body
    typed = isinstance(fields, str)
    check_request(json.loads(fields) if typed else fields, typed=typed, is_noise=is_noise)


def check_request(fields, *, typed=True, is_noise=False):
    from omni_plugin_noise.family import NoiseRequest

    model = NoiseRequest if is_noise else generate_docs.wan_request_model(experts=2)
    if not fields.keys().isdisjoint(("image", *ALIASES)):
        model = generate_docs.wan_image_request_model()
    parse_request(model, with_placeholders(to_request_values(fields, model), model), strict=typed)


def parsed(code: str) -> ast.Module | None:
    """``None`` for code that does not compile, which has a test of its own."""
    try:
        return ast.parse(code)
    except SyntaxError:
        return None


def python_requests(page):
    """The fields that each ``generate(...)`` and ``videos.create...(...)`` of a page asks for."""
    for tree in filter(None, map(parsed, blocks(page, "python"))):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("generate", "create", "create_and_poll"):
                continue
            is_speech = "speech" in ast.unparse(node.func)
            given = {k.arg: k.value for k in node.keywords if k.arg not in ("progress", "frame_type")}
            extra = ast.literal_eval(given.pop("extra_body")) if "extra_body" in given else {}
            fields = {name: ast.literal_eval(value) for name, value in given.items()} | extra
            yield fields | ({"prompt": ast.literal_eval(node.args[0])} if node.args else {}), is_speech


@pytest.mark.parametrize("request_", cases(python_requests))
def test_a_request_from_python_is_valid(request_):
    fields, is_speech = request_
    (check_speech if is_speech else check_request)(fields)


def speech_bodies(page):
    """JSON text or form fields of each ``curl`` that asks for speech."""
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "curl" and re.search(r"/v1/audio/speech(/batch)?$", words[1]):
            form = [value for flag, value in pairwise(words) if flag == "-F"]
            data = [value for flag, value in pairwise(words) if flag == "-d"]
            yield data[0] if data else dict(item.split("=", 1) for item in form)


@pytest.mark.parametrize("body", cases(speech_bodies))
def test_a_body_for_speech_that_is_shown_is_valid(body):
    typed = isinstance(body, str)
    fields = json.loads(body) if typed else body
    for item in fields.pop("items", [{}]):
        check_speech({**fields, **item}, typed=typed)


def check_speech(fields, *, typed=True):
    fields = {name: value for name, value in fields.items() if name not in ("model", "ref_audio")}
    delivery = {name: fields.pop(name) for name in list(fields) if name in Delivery.model_fields}
    parse_request(Delivery, delivery, strict=typed)
    parse_request(SpeechRequest, fields, strict=typed)


HTTP = ROOT / "docs" / "http.md"


def test_the_job_that_is_shown_has_the_fields_of_a_job():
    [job] = [value for text in blocks(HTTP, "json") if (value := json.loads(text)).get("object") == "video"]
    assert list(job) == list(VideoJob("id", "wan", "x", "1x1", "1", 0, 0).to_json())


def test_the_health_that_is_shown_is_that_of_a_stage():
    [health] = [value for text in blocks(HTTP, "json") if "stages" in (value := json.loads(text))]
    stage = SupervisedStage.__new__(SupervisedStage)
    stage.state, stage.restarts, stage.reason = StageState.RESTARTING, 1, "its process ended"
    assert health == {"status": "unhealthy", "stages": {"diffusion": stage.status()}}
    text = HTTP.read_text(encoding="utf-8")
    assert all(f"`{state}`" in text for state in StageState)
    assert all(f"| `{name}` |" in text for name in SleepRequest.model_fields)


def test_the_limits_that_are_named_are_those():
    text = HTTP.read_text(encoding="utf-8")
    assert f"at most {MAX_BODY_BYTES >> 20} MiB, or {MAX_IMAGE_BODY_BYTES >> 20} MiB where" in text
    assert f"at most {MAX_SIDE} pixels along each side" in text
    assert "double up to a minute" in text and LAST_DELAY == 60
    speech = " ".join(text[text.index("## Speech") :].split())
    assert f"JSON or a form of at most {MAX_SPEECH_BODY_BYTES >> 20} MiB" in speech
    assert f"JSON of at most {MAX_BATCH_BODY_BYTES >> 20} MiB" in speech
    assert f"at most {audio.MAX_SOUND_BYTES >> 20} MiB, from {audio.MIN_SOUND_SECONDS} to" in speech
    assert f"to {audio.MAX_SOUND_SECONDS:g} seconds long" in speech
    assert f"takes nothing for {speech_answers.SEND_SECONDS:g} seconds" in speech
    assert f"sent or spoken for {speech_socket.IDLE_SECONDS:g} seconds" in speech
    assert f"may have {speech_socket.MAX_TEXT} characters" in speech
    assert f"Up to {speech_socket.MAX_WAITING} may wait" in speech


def test_the_error_that_is_shown_is_the_one_that_is_given():
    [shown] = [value for text in blocks(HTTP, "json") if "error" in (value := json.loads(text)) and "id" not in value]
    with pytest.raises(RequestError) as refused:
        check_request({"prompt": "x", "num_frames": 6})
    assert json.loads(bytes(error_response(refused.value).body)) == shown


def test_every_shared_field_and_every_status_is_explained():
    text = HTTP.read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in SHARED)
    assert all(f"| {status} | `{kind}` |" in text for status, kind in ERROR_TYPES.items())


def test_the_checks_see_what_the_pages_show():
    """Else a change of form would make every check above pass by finding nothing."""
    for find in (serve_commands, other_commands, curl_bodies, python_requests):
        assert len(cases(find)) >= 4, find.__name__
    assert len(cases(speech_bodies)) >= 3


def named_tests(page):
    """``(file, name)`` of each test that a page names, as ``file::name`` between backticks."""
    return re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("test", cases(named_tests))
def test_a_test_that_is_named_is_there(test):
    file, name = test
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_of_the_field_notes_says_where_omni_stands():
    rows = re.findall(r"^\| [\w-]+#\d+ \| .+ \| (.+) \|$", (ROOT / "docs" / "field-notes.md").read_text(), re.MULTILINE)
    assert len(rows) >= 50
    for row in rows:
        assert "::" in row or row.startswith(("Not yet: ", "Nothing to test")), row
