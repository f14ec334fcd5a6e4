"""The videos API with a model whose requests are as slow or faulty as a test wants: jobs, aborts, errors, bounds."""

import asyncio
import base64
import io
import json
import socket
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from reference import toy_video

from omni_core.media import decode_video

pytestmark = pytest.mark.serve


def wait_for(predicate, seconds=20.0, what="it"):
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.02)
    return value


@pytest.fixture
def http(toy_server):
    yield toy_server.http
    for job in toy_server.http.get("/v1/videos", params={"limit": 100}).json()["data"]:
        toy_server.http.delete(f"/v1/videos/{job['id']}")


@pytest.fixture
def create(http):
    def make(prompt="a cat", **fields):
        answer = http.post("/v1/videos", json={"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return make


@pytest.fixture
def job(http):
    return lambda made: http.get(f"/v1/videos/{made['id']}").json()


def slow(**fields):
    return {"num_inference_steps": 1000, "step_seconds": 0.02, **fields}


def test_a_job_goes_through_its_states_and_ends_with_the_file(http, create, job):
    made = create(num_inference_steps=40, step_seconds=0.02, num_frames=9, fps=8, seed=5, size="64x32")
    assert (made["object"], made["status"], made["progress"]) == ("video", "queued", 0)
    assert (made["size"], made["seconds"], made["model"], made["seed"]) == ("64x32", "1.125", "toy", 5)
    seen = []
    while True:
        now = job(made)
        seen.append((now["status"], now["progress"]))
        if now["status"] == "completed":
            break
        time.sleep(0.02)
    assert [status for status, _ in seen if status not in ("queued", "in_progress")] == ["completed"]
    progress = [percent for _, percent in seen]
    assert progress == sorted(progress) and len(set(progress)) > 5
    content = http.get(f"/v1/videos/{made['id']}/content")
    assert content.headers["content-type"] == "video/mp4"
    frames, fps = decode_video(io.BytesIO(content.content))
    assert frames.shape == (9, 32, 64, 3) and fps == 8
    expected = toy_video("a cat", 5, steps=40, frames=9, height=32, width=64)
    assert np.abs(frames / 255 - expected).mean() < 0.05, "H.264 is lossy, but this is the video"


def test_a_job_that_waits_says_queued(create, job):
    running = [create(**slow()) for _ in range(2)]
    waiting = create()
    wait_for(lambda: all(job(made)["status"] == "in_progress" for made in running))
    time.sleep(0.3)
    assert job(waiting)["status"] == "queued"


def test_deleting_a_running_job_stops_the_engine_and_forgets_it(http, create, job):
    running = [create(**slow()) for _ in range(2)]
    waiting = create()
    wait_for(lambda: all(job(made)["status"] == "in_progress" for made in running))
    answer = http.delete(f"/v1/videos/{running[0]['id']}")
    assert answer.json() == {"id": running[0]["id"], "object": "video.deleted", "deleted": True}
    assert http.get(f"/v1/videos/{running[0]['id']}").status_code == 404
    wait_for(lambda: job(waiting)["status"] == "completed", 5, "the place of the deleted job is taken")


def test_a_queued_job_that_is_deleted_never_starts(http, create, job):
    running = [create(**slow()) for _ in range(2)]
    waiting = create(**slow())
    http.delete(f"/v1/videos/{waiting['id']}")
    for made in running:
        http.delete(f"/v1/videos/{made['id']}")
    last = create()
    wait_for(lambda: job(last)["status"] == "completed", 5)


def test_a_failing_job_says_why_and_leaves_the_others(create, job, http):
    good = create(num_inference_steps=60, step_seconds=0.01)
    bad = create(fail_in="predict", fail_at=2)
    failed = wait_for(lambda: (now := job(bad))["status"] == "failed" and now)
    assert "asked to fail in predict" in failed["error"]["message"]
    assert "diffusion" in failed["error"]["message"] and bad["id"] in failed["error"]["message"]
    assert http.get(f"/v1/videos/{bad['id']}/content").status_code == 409
    wait_for(lambda: job(good)["status"] == "completed")
    assert http.get("/health").status_code == 200


def test_content_before_the_end_is_a_conflict(http, create):
    made = create(**slow())
    answer = http.get(f"/v1/videos/{made['id']}/content")
    assert answer.status_code == 409
    assert made["id"] in answer.json()["error"]["message"]


def test_one_request_too_many_is_turned_away(http, create):
    for _ in range(5):
        create(**slow())
    answer = http.post("/v1/videos", json={"prompt": "a cat"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "RateLimitError"


def test_a_client_that_leaves_a_synchronous_request_aborts_it(toy_server, http, create, job):
    body = b'{"prompt": "a cat", "num_inference_steps": 1000, "step_seconds": 0.02}'
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", toy_server.port)) as connection:
            head = "POST /v1/videos/sync HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.5)
    made = create()
    wait_for(lambda: job(made)["status"] == "completed", 5, "the places are free at once, so the next job's end")


def test_the_synchronous_endpoint_answers_with_the_file_and_its_seed(http):
    answer = http.post("/v1/videos/sync", json={"prompt": "a cat", "num_frames": 5})
    assert answer.status_code == 200 and answer.headers["content-type"] == "video/mp4"
    again = http.post(
        "/v1/videos/sync", json={"prompt": "a cat", "num_frames": 5, "seed": int(answer.headers["x-seed"])}
    )
    assert again.content == answer.content
    failed = http.post("/v1/videos/sync", json={"prompt": "a cat", "fail_in": "start"})
    assert failed.status_code == 500 and "asked to fail" in failed.json()["error"]["message"]


def test_lists_are_paged(http, create):
    made = [create(f"p{i}")["id"] for i in range(3)]
    page = http.get("/v1/videos", params={"limit": 2, "order": "asc"}).json()
    assert [job["id"] for job in page["data"]] == made[:2] and page["has_more"]
    rest = http.get("/v1/videos", params={"limit": 2, "order": "asc", "after": page["last_id"]}).json()
    assert [job["id"] for job in rest["data"]] == made[2:] and not rest["has_more"]
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "video_x"}):
        assert http.get("/v1/videos", params=wrong).status_code == 400


BAD = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "  "}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": "x", "width": 33}, "width"),
    ({"prompt": "x", "width": 0}, "width"),
    ({"prompt": "x", "width": 100000}, "width"),
    ({"prompt": "x", "width": "32"}, "width"),
    ({"prompt": "x", "width": True}, "width"),
    ({"prompt": "x", "num_frames": 6}, "num_frames"),
    ({"prompt": "x", "num_inference_steps": -1}, "num_inference_steps"),
    ({"prompt": "x", "num_inference_steps": 1e9}, "num_inference_steps"),
    ({"prompt": "x", "seed": -1}, "seed"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "seed": 0.5}, "seed"),
    ({"prompt": "x", "fps": 0}, "fps"),
    ({"prompt": "x", "size": "32"}, "size"),
    ({"prompt": "x", "size": "32x"}, "size"),
    ({"prompt": "x", "size": 32}, "size"),
    ({"prompt": "x", "size": "32x32x"}, "size"),
    ({"prompt": "x", "size": "032x32"}, "size"),
    ({"prompt": "x", "size": " 32x32"}, "size"),
    ({"prompt": "x", "size": "33x32"}, "width"),
    ({"prompt": "x", "size": "32x32", "width": 32}, "size"),
    ({"prompt": "x", "seconds": "soon"}, "seconds"),
    ({"prompt": "x", "seconds": -1}, "seconds"),
    ({"prompt": "x", "seconds": True}, "seconds"),
    ({"prompt": "x", "seconds": "3600"}, "seconds"),
    ({"prompt": "x", "seconds": "nan"}, "seconds"),
    ({"prompt": "x", "seconds": "0_1"}, "seconds"),
    ({"prompt": "x", "seconds": "100"}, "seconds"),
    ({"prompt": "x", "seconds": "1", "num_frames": 5}, "seconds"),
    ({"prompt": "x", "n": 2}, "n"),
    ({"prompt": "x", "input_reference": "a.png"}, "image"),
    ({"prompt": "x", "image": "data:image/png;base64,AAAA"}, "image"),
    ({"prompt": "x", "image": "file:///etc/passwd"}, "image"),
    ({"prompt": "x", "image": "http://127.0.0.1:9/x.png"}, "image"),
    ({"prompt": "x", "image": {"file_id": "x"}}, "image"),
    ({"prompt": "x", "image": "{"}, "image"),
    ({"prompt": "x", "image": 3}, "image"),
    ({"prompt": "x", "image": "x", "input_reference": "y"}, "input_reference"),
    ({"prompt": "x", "extra_params": 3}, "extra_params"),
    ({"prompt": "x", "extra_params": {"width": 33}}, "width"),
    ({"prompt": "x", "width": 32, "extra_params": {"width": 32}}, "width"),
    ({"prompt": "x", "extra_params": {"nonsense": 1}}, "nonsense"),
    ({"prompt": "x", "extra_params": "[" * 100000}, "extra_params"),
    ({"prompt": "x", "extra_params": {"model": "toy"}}, "model"),
    ({"prompt": "x", "seconds": 1, "fps": "nan"}, "fps"),
    ({"prompt": "x", "seconds": 1, "fps": 0}, "fps"),
    ({"prompt": "x", "seconds": 1, "fps": [8]}, "fps"),
    ({"prompt": "x", "seconds": 3000, "fps": 1e308}, "fps"),
    ({"prompt": "x", "image": {"image_url": {"url": "x", "detail": "high"}}}, "image"),
    ({"prompt": "x", "input_reference": {"image_url": {"detail": "high"}}}, "image"),
    ({"prompt": "x", "extra_params": '{"\\ud800": 1}'}, None),
    ({"prompt": "x", "image": '{"image_url": "\\ud800"}'}, None),
    ({"prompt": "x", "image": '{"image_url": "x", "image_url": "y"}'}, None),
]


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync"])
@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_field_is_named_with_what_is_allowed(toy_server, path, body, param):
    answer = toy_server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["code"] == 400 and error["type"] == "BadRequestError"
    assert (param or "lone surrogates") in error["message"] or "given twice" in error["message"]
    assert toy_server.http.get("/v1/videos").json()["data"] == [], "nothing was queued"


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"{", "application/json"), (b"[]", "application/json"), (b"\xff", "application/json"), (b"x", "text/plain"),
     (b"[" * 5000, "application/json"), (b"--x", "multipart/form-data"), (b"", "application/json"),
     (b'{"\\ud800": 1, "\\ud800": 1}', "application/json"),
     (b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n',
      "multipart/form-data; boundary=x; charset=undefined")],
)  # fmt: skip
def test_a_body_that_is_no_object_is_a_bad_request(toy_server, content, kind):
    answer = toy_server.http.post("/v1/videos", content=content, headers={"content-type": kind})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_of_unknown_length_that_is_too_large_is_refused(toy_server, kind):
    def chunks():
        yield b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n" if "multipart" in kind else b"a="
        for _ in range(70):
            yield b"b" * (1 << 20)

    answer = toy_server.http.post("/v1/videos", content=chunks(), headers={"content-type": f"{kind}; boundary=x"})
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["message"]


def test_json_without_its_content_type_is_told_so(toy_server):
    answer = toy_server.http.post(
        "/v1/videos", content='{"prompt": "x"}', headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == 400 and "Content-Type: application/json" in answer.json()["error"]["message"]


def test_numbers_that_are_none_are_refused(toy_server):
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        content = f'{{"prompt": "x", "step_seconds": {value}}}'
        answer = toy_server.http.post("/v1/videos", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "step_seconds"


@pytest.mark.parametrize(("name", "value"), [("width", "3_2"), ("seed", "1_0"), ("step_seconds", "0_0.1")])
def test_a_number_of_a_form_is_written_in_digits(toy_server, name, value):
    """Python takes an underscore between digits, and pydantic with it."""
    answer = toy_server.http.post("/v1/videos", data={"prompt": "a_b", name: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == name and error["message"].startswith(f"{name}={value!r}: must be ")


def test_a_video_that_is_sent_at_once_is_in_the_servers_own_folder(toy_server):
    """So that it does not stay for ever where the server is killed meanwhile."""
    before = set(Path(tempfile.gettempdir()).glob("omni-*.mp4"))
    with toy_server.http.stream("POST", "/v1/videos/sync", json={"prompt": "a cat", "seed": 1}) as answer:
        assert answer.status_code == 200
        next(answer.iter_raw(1))
        assert set(Path(tempfile.gettempdir()).glob("omni-*.mp4")) == before


def test_a_name_given_twice_among_very_many_is_found_at_once(toy_server):
    """As many names as fit, the last of them twice: to count each in turn held the whole server up for minutes."""
    body = "{" + "".join(f'"k{i}":0,' for i in range(90000)) + '"z":0,"z":0}'
    answer = toy_server.http.post("/v1/videos", content=body, headers={"content-type": "application/json"}, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "z is given twice"


def test_a_body_that_is_too_large_is_refused(toy_server):
    answer = toy_server.http.post(
        "/v1/videos", content=b" " * (64 << 20) + b"{}", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


def test_ranges_are_in_the_message(toy_server):
    message = toy_server.http.post("/v1/videos", json={"prompt": "x", "width": 33}).json()["error"]["message"]
    assert "16 to 512" in message and "multiple of 16" in message
    message = toy_server.http.post("/v1/videos", json={"prompt": "x", "num_frame": 5}).json()["error"]["message"]
    assert "did you mean 'num_frames'?" in message


@pytest.mark.parametrize("path", ["/v1/videos/video_0", "/v1/videos/video_" + "0" * 32 + "/content"])
def test_an_unknown_video_is_not_found(toy_server, path):
    answer = toy_server.http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_an_unknown_model_is_not_found_and_each_served_name_is_known(toy_server):
    answer = toy_server.http.post("/v1/videos", json={"prompt": "x", "model": "nope"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    names = [model["id"] for model in toy_server.http.get("/v1/models").json()["data"]]
    assert names == ["toy", "toy-too"]
    for name in names:
        assert toy_server.http.post("/v1/videos/sync", json={"prompt": "x", "model": name}).status_code == 200


def test_forms_are_read_as_openais_client_sends_them(toy_server):
    answer = toy_server.http.post(
        "/v1/videos/sync", data={"prompt": "a cat", "size": "32x32", "num_frames": "5", "seed": "3"}
    )
    assert answer.status_code == 200
    files = {"nonsense": ("a.png", b"x", "image/png")}
    answer = toy_server.http.post("/v1/videos/sync", data={"prompt": "a cat"}, files=files)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "nonsense"
    files = {"input_reference": ("a.png", b"x", "image/png")}
    answer = toy_server.http.post("/v1/videos/sync", data={"prompt": "a cat"}, files=files)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "image"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["image", "image"], "image is given twice"),
        (["image", "input_reference"], "input_reference and image exclude each other"),
        (["image"] * 6, "Too many files"),
    ],
)
def test_an_image_too_many_is_refused(toy_server, names, message):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "PNG")
    files = [(name, ("a.png", buffer.getvalue(), "image/png")) for name in names]
    answer = toy_server.http.post("/v1/videos", data={"prompt": "x"}, files=files)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("colour", [(255, 128, 0), (255, 128, 0, 0)], ids=["opaque", "transparent"])
def test_an_image_means_the_same_however_it_comes(toy_server, colour):
    buffer = io.BytesIO()
    Image.new("RGBA" if len(colour) == 4 else "RGB", (40, 30), colour).save(buffer, "PNG")
    png = buffer.getvalue()
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    fields = {"prompt": "a cat", "seed": "1"}
    plain = toy_server.http.post("/v1/videos/sync", data=fields).content
    answers = [
        toy_server.http.post("/v1/videos/sync", data=fields, files={"input_reference": ("a.png", png, "image/png")}),
        toy_server.http.post("/v1/videos/sync", data=fields, files={"image": ("a.png", png, "image/png")}),
        toy_server.http.post("/v1/videos/sync", data={**fields, "image_reference": json.dumps({"image_url": url})}),
        toy_server.http.post("/v1/videos/sync", json={"prompt": "a cat", "seed": 1, "image": url}),
        toy_server.http.post("/v1/videos/sync", json={"prompt": "a cat", "seed": 1, "image": {"image_url": url}}),
        toy_server.http.post(
            "/v1/videos/sync", json={"prompt": "a cat", "seed": 1, "input_reference": {"image_url": {"url": url}}}
        ),
    ]
    assert [answer.status_code for answer in answers] == [200] * 6, [answer.text[:200] for answer in answers]
    assert {answer.content for answer in answers} == {answers[0].content} != {plain}


def test_openais_python_client_works(toy_server):
    client = openai.OpenAI(base_url=f"{toy_server.url}/v1", api_key="none")
    video = client.videos.create_and_poll(
        model="toy", prompt="a cat", size="64x32", seconds="1", extra_body={"seed": 4}, poll_interval_ms=50
    )
    assert video.status == "completed" and video.progress == 100
    frames, fps = decode_video(io.BytesIO(client.videos.download_content(video.id).read()))
    assert frames.shape == (9, 32, 64, 3) and fps == 8
    assert video.id in [item.id for item in client.videos.list()]
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)
    with pytest.raises(openai.BadRequestError):
        client.videos.create(model="toy", prompt="a cat", size="63x32")


def test_many_requests_at_once_give_what_each_gives_alone(toy_server):
    async def work():
        async with httpx.AsyncClient(base_url=toy_server.url, timeout=60) as client:
            fields = [
                {"prompt": f"p{i}", "seed": i, "num_inference_steps": 5 + i, "step_seconds": 0.01} for i in range(5)
            ]
            together = await asyncio.gather(*(client.post("/v1/videos/sync", json=f) for f in fields))
            alone = [await client.post("/v1/videos/sync", json=f) for f in fields]
            return together, alone

    together, alone = asyncio.run(work())
    assert [a.content for a in together] == [a.content for a in alone]
    assert len({a.content for a in alone}) == 5


def test_routes_of_token_models_are_not_there(toy_server):
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        assert toy_server.http.post(path, json={}).status_code == 404
    assert toy_server.http.get("/metrics").status_code == 200
