"""Requests made up from the speech routes' own ``/openapi.json``: whatever comes in, the answer is one it declares."""

import copy
import time
from collections import Counter

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from speech_fakes import RATE, SpeechServer

from omni_core.audio import encode_sound

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance, negative_data_rejection,
]  # fmt: skip

OPERATIONS = ["POST /v1/audio/speech", "POST /v1/audio/speech/batch", "GET /v1/audio/voices", "POST /v1/audio/voices",
              "DELETE /v1/audio/voices/{name}"]  # fmt: skip

SAMPLE = encode_sound(np.sin(np.arange(RATE // 2) / 9).astype(np.float32) / 3, "wav", RATE)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with SpeechServer(tmp_path_factory.mktemp("voices"), limit=10_000).running() as server:
        server.http = httpx.Client(base_url=server.url, timeout=60)
        yield server


@pytest.fixture(scope="module")
def api(server):
    """The operations; what decides how slow or faulty the made-up stages are is left out."""
    description = copy.deepcopy(server.http.get("/openapi.json").json())
    for path in ("/v1/audio/speech", "/v1/audio/speech/batch"):
        for content in description["paths"][path]["post"]["requestBody"]["content"].values():
            schema = content["schema"]
            for owner in (schema, schema["properties"].get("items", {}).get("items", {})):
                for name in ("frames", "frame_seconds", "fail_at", "ref_audio"):
                    owner.get("properties", {}).pop(name, None)
    config = {"generation": {"deterministic": True}, "phases": {"coverage": {"unexpected-methods": []}}}
    schema = schemathesis.openapi.from_dict(description, config=schemathesis.Config.from_dict(config))
    schema.config.update(base_url=server.url)
    return schema


@pytest.fixture
def ask(server):
    def ask(case):
        if (
            isinstance(case.body, dict)
            and "audio_sample" in case.body
            and isinstance(case.body["audio_sample"], bytes | str)
        ):
            case.body["audio_sample"] = SAMPLE
        answer = case.call(timeout=30)
        per_item = case.path.endswith("/batch") and answer.status_code == 200  # a bad item is no bad batch
        case.validate_response(answer, checks=CHECKS[:-1] if per_item else CHECKS)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"].strip() and error["type"] and error["code"] == answer.status_code
        ask.seen[answer.status_code] += 1

    ask.seen = Counter()
    return ask


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_limits_of_each_field_are_kept(operation, api, ask):
    method, _, path = operation.partition(" ")
    for case in api.iter_coverage_cases(
        api[path][method], generation_modes=list(GenerationMode), generation_config=api.config.generation
    ):
        ask(case)
    if method == "POST":
        assert ask.seen[200] >= 1 and ask.seen[400] >= 5, f"only {dict(ask.seen)}"


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_comes_in_the_answer_is_one_that_is_declared(operation, mode, api, ask):
    if mode is GenerationMode.NEGATIVE and not operation.startswith("POST"):
        return
    if mode is GenerationMode.NEGATIVE and operation.endswith("/voices"):
        return  # an empty list in a form is no field at all, and is counted as a wrong one that was accepted
    method, _, path = operation.partition(" ")

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=30, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case):
        ask(case)

    check()


def test_afterwards_nothing_is_left(server):
    deadline = time.monotonic() + 10
    while server.engine.active or server.engine.running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.talker.begun == server.talker.left > 0
