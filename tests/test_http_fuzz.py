"""Requests made up from the server's own ``/openapi.json``: whatever comes in, the answer is one that it declares."""

import copy
import time
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from omni_plugin_toy.family import ToyRequest
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from omni_core.http.stages import stage_router
from omni_core.http.videos import video_router

pytestmark = pytest.mark.serve

STORED = 8
"""How many ended jobs the server keeps."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]

OWN, OPENAIS, ALIASES = ("width", "height", "num_frames"), ("size", "seconds"), ("input_reference", "image_reference")
"""Names for the same things."""

OF_VLLM = {"/load", "/version", "/kv_event_sources", "/metrics", "/v1/models", "/ping"}
"""Routes of vLLM's app, which are vLLM's to test."""


def own_operations():
    """``GET /health`` and so on: every route that a module of ours makes."""
    engine = SimpleNamespace(request_model=ToyRequest)
    routers = [stage_router({}), video_router(SimpleNamespace(engine=engine, models=["toy"]))]
    return {f"{method} {route.path}" for router in routers for route in router.routes for method in route.methods}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(scope="module")
def server(serve_toy, store):
    return serve_toy(
        "--served-model-name", "toy", "--max-num-seqs", "4",
        "--video-store", str(store), "--max-stored-videos", str(STORED),
    )  # fmt: skip


@pytest.fixture(scope="module")
def description(server):
    return server.http.get("/openapi.json").json()


@pytest.fixture(scope="module", params=["own-names", "openai-names"])
def api(server, description, request):
    """Our operations, with one of two names for what has two: requests with both would all be refused for that."""
    ours = {operation.partition(" ")[2] for operation in own_operations()}
    paths = copy.deepcopy({path: item for path, item in description["paths"].items() if path in ours})
    dropped = {"own-names": OPENAIS, "openai-names": OWN}[request.param]
    for path in ("/v1/videos", "/v1/videos/sync"):
        for content in paths[path]["post"]["requestBody"]["content"].values():
            for name in (*dropped, *ALIASES):
                del content["schema"]["properties"][name]
    config = {"generation": {"deterministic": True}, "phases": {"coverage": {"unexpected-methods": []}}}
    schema = schemathesis.openapi.from_dict(
        {**description, "paths": paths}, config=schemathesis.Config.from_dict(config)
    )
    schema.config.update(base_url=server.url)
    return schema


def test_every_route_of_ours_is_described_and_the_others_are_vllms(description):
    described = {
        f"{method.upper()} {path}" for path, operations in description["paths"].items() for method in operations
    }
    ours = own_operations()
    assert ours <= described
    assert {operation.partition(" ")[2] for operation in described - ours} == OF_VLLM


@pytest.fixture
def ask(server):
    """Send a case, check the answer, and count it by its status in ``ask.seen``."""

    def ask(case):
        make_quick(case.body)
        name_a_job(case, server)
        answer = case.call(timeout=30)
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code != 503, "every stage is up"
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"].strip() and error["type"] and error["code"] == answer.status_code
        ask.seen[answer.status_code] += 1

    ask.seen = Counter()
    return ask


OPERATIONS = sorted(own_operations())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_limits_of_each_field_are_kept(operation, api, ask):
    """Each field in turn at and beyond its limits, of another type, missing or repeated; the others are valid."""
    method, _, path = operation.partition(" ")
    cases = api.iter_coverage_cases(
        api[path][method], generation_modes=list(GenerationMode), generation_config=api.config.generation
    )
    for case in cases:
        ask(case)
    if "/v1/videos" in operation and method == "POST":
        assert ask.seen[200] >= 20 and ask.seen[400] >= 100, f"only {dict(ask.seen)}"


def fuzz_cases():
    """Each operation with what its declaration admits, and with what it does not where it admits not everything."""
    for operation in OPERATIONS:
        yield operation, GenerationMode.POSITIVE
        if operation.startswith("POST") or operation.endswith(("/v1/videos", "/content")):
            yield operation, GenerationMode.NEGATIVE


@pytest.mark.parametrize(("operation", "mode"), list(fuzz_cases()), ids=str)
def test_whatever_comes_in_the_answer_is_one_that_is_declared(operation, mode, api, ask):
    method, _, path = operation.partition(" ")

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=40, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case):
        ask(case)

    check()
    if mode is GenerationMode.POSITIVE and not path.endswith("/sleep"):  # the stage was not started for it
        assert ask.seen[200] >= 1, f"only {dict(ask.seen)}"


def test_afterwards_the_server_is_well_and_keeps_no_more_than_it_should(server, store):
    """Runs last: what the tests above asked for is over, and what is left of it is bounded."""

    def jobs():
        return server.http.get("/v1/videos", params={"limit": 100}).json()["data"]

    deadline = time.monotonic() + 30
    while any(job["status"] in ("queued", "in_progress") for job in jobs()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.http.get("/health").json()["stages"]["diffusion"] == {
        "state": "running", "restarts": 0, "reason": None,
    }  # fmt: skip
    left = jobs()
    assert 0 < len(left) <= STORED
    files = {path.name for path in store.iterdir() if path.suffix == ".mp4"}
    assert files == {f"{job['id']}.mp4" for job in left if job["status"] == "completed"}
    assert server.http.post("/v1/videos/sync", json={"prompt": "x", "seed": 1}).status_code == 200


def make_quick(body):
    """Bound the work that a valid body asks for; what is invalid stays as it is."""
    if not isinstance(body, dict):
        return
    most = {"width": 48, "height": 48, "num_frames": 9, "num_inference_steps": 8, "step_seconds": 0, "chunk_seconds": 0}
    for name, limit in most.items():
        value, allowed = body.get(name), ToyRequest.model_json_schema()["properties"][name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and limit < value <= allowed["maximum"] and not value % allowed.get("multipleOf", value):
            body[name] = limit
    if body.get("fail_in") in ("start", "predict", "advance", "decode"):
        body["fail_in"] = ""


def name_a_job(case, server):
    """Let most requests for one job name a job that is there, some of them one that is done."""
    wanted = (case.path_parameters or {}).get("video_id")
    if isinstance(wanted, str) and (choice := zlib.crc32(wanted.encode(errors="replace")) % 4):
        job = server.http.post("/v1/videos", json={"prompt": "x", "num_inference_steps": 1}).json()
        while choice == 1 and job["status"] != "completed":
            job = server.http.get(f"/v1/videos/{job['id']}").json()
        case.path_parameters["video_id"] = job["id"]
