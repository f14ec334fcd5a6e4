"""Images and sound by URL: which hosts and files the server reads, and what becomes of those that are neither."""

import asyncio
import base64
import io
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from omni_core.errors import RequestError
from omni_core.vllm.media import ImageFetcher, SoundFetcher


def png(width=40, height=30):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (255, 128, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class Pages(BaseHTTPRequestHandler):
    """``/image.png``, and what else a client may be sent to."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/image.png")
            self.end_headers()
            return
        if self.path == "/slow":
            time.sleep(3)
        status, body, length = {
            "/image.png": (200, png(), None),
            "/text": (200, b"<html>no image</html>", None),
            "/empty": (200, b"", None),
            "/half.png": (200, png(400, 300)[:-200], None),
            "/cut.png": (200, png()[:20], 5000),
            "/huge": (200, b"x" * (2 << 20), None),
            "/large": (200, b"x" * ((10 << 20) + 1), None),
            "/wide.png": (200, png(9000, 1), None),
            "/bomb.ppm": (200, b"P6 99999 99999 255\n", None),
            "/program.eps": (200, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", None),
            "/broken": (500, b"", None),
        }.get(self.path, (404, b"", None))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture(scope="module")
def pages():
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        server.asked = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``allowed/image.png``, and beside it ``secret.png`` with a link to it from within."""
    base = tmp_path_factory.mktemp("media")
    (base / "allowed").mkdir()
    (base / "allowed" / "image.png").write_bytes(png())
    (base / "secret.png").write_bytes(png())
    (base / "allowed" / "link.png").symlink_to(base / "secret.png")
    return base


@pytest.fixture(scope="module")
def server(serve_toy, folder):
    """A server that may read one folder, and ask 127.0.0.1 but not localhost."""
    return serve_toy(
        "--allowed-local-media-path", str(folder / "allowed"), "--allowed-media-domains", "127.0.0.1",
        env={
            "VLLM_IMAGE_FETCH_TIMEOUT": "1", "VLLM_MEDIA_FETCH_MAX_RETRIES": "1",
            "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "1", "no_proxy": "*",
        },
    )  # fmt: skip


@pytest.fixture
def ask(server):
    """Ask for a video with an image, by URL."""
    return lambda url: server.http.post("/v1/videos/sync", json={"prompt": "a cat", "seed": 1, "image": url})


def refused(answer, *words):
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "image" and error["message"].startswith("image: cannot load ")
    assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.serve
def test_an_image_by_url_is_the_image(ask, server, pages, folder):
    upload = server.http.post(
        "/v1/videos/sync", data={"prompt": "a cat", "seed": "1"}, files={"image": ("a.png", png(), "image/png")}
    )
    for url in (f"{pages.url}/image.png", f"file://{folder}/allowed/image.png"):
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        assert answer.content == upload.content
    assert server.http.post("/v1/videos/sync", json={"prompt": "a cat", "seed": 1}).content != upload.content


@pytest.mark.serve
@pytest.mark.parametrize(
    "url", ["http://localhost:{port}/image.png", "http://127.0.0.1@localhost:{port}/image.png", "http://[::1]:{port}/x"]
)
def test_a_host_that_is_not_allowed_is_not_asked(ask, pages, url):
    before = len(pages.asked)
    refused(ask(url.format(port=pages.server_port)), "allowed domains")
    assert len(pages.asked) == before


@pytest.mark.serve
def test_a_redirect_to_a_host_that_is_not_allowed_is_not_followed(ask, pages):
    before = len(pages.asked)
    refused(ask(f"{pages.url}/to/localhost"))
    assert pages.asked[before:] == ["/to/localhost"]


@pytest.mark.serve
@pytest.mark.parametrize(
    "path", ["secret.png", "allowed/../secret.png", "allowed/%2e%2e/secret.png", "allowed/link.png", "allowed"]
)
def test_a_file_outside_the_allowed_folder_is_refused(ask, folder, path):
    refused(ask(f"file://{folder}/{path}"))


@pytest.mark.serve
@pytest.mark.parametrize(
    "path",
    ["text", "empty", "half.png", "cut.png", "huge", "broken", "nothing", "slow", "bomb.ppm", "program.eps"],
)
def test_what_is_no_image_is_refused(ask, server, pages, path):
    refused(ask(f"{pages.url}/{path}"))
    assert server.http.get("/health").status_code == 200


@pytest.mark.serve
def test_an_image_that_is_too_large_is_refused(ask, pages):
    answer = ask(f"{pages.url}/wide.png")
    assert answer.status_code == 400 and "at most 8192 pixels" in answer.json()["error"]["message"]


@pytest.mark.serve
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x.png", "http://", "http://127.0.0.1:99999/", "ftp://x/y", "x\x00"]
)
def test_what_cannot_be_asked_is_refused(ask, url):
    refused(ask(url))


def test_the_size_of_an_image_is_looked_at_before_it_is_read(monkeypatch):
    url = "data:image/png;base64," + base64.b64encode(png(9000, 1)).decode()
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was read"))
    with pytest.raises(RequestError, match="at most 8192 pixels"):
        asyncio.run(ImageFetcher()(url))


def test_no_file_is_read_without_an_allowed_folder(folder):
    with pytest.raises(RequestError, match="--allowed-local-media-path"):
        asyncio.run(ImageFetcher()(f"file://{folder}/allowed/image.png"))


def fetch_sound(url, folder=""):
    return asyncio.run(SoundFetcher(str(folder), ["127.0.0.1"])(url))


def test_a_file_of_sound_comes_as_it_is(pages, folder):
    assert fetch_sound(f"{pages.url}/image.png") == png()
    assert fetch_sound(f"file://{folder}/allowed/image.png", folder / "allowed") == png()


@pytest.mark.parametrize(
    "url",
    ["http://localhost:{port}/image.png", "http://127.0.0.1:{port}/nothing", "http://127.0.0.1:{port}/large",
     "file://{folder}/secret.png", "file://{folder}/allowed/link.png",
     "file://{folder}/allowed/large", "file://{folder}/allowed/nothing", "ftp://127.0.0.1/x",
     "data:audio/wav;base64,AAAA", "http://127.0.0.1:9/x", "http://", "x:\x00"],
)  # fmt: skip
def test_sound_that_may_not_or_cannot_be_fetched_is_refused(pages, folder, url, monkeypatch):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    (folder / "allowed" / "large").write_bytes(bytes((10 << 20) + 1))
    with pytest.raises(RequestError, match=r"cannot load|it may have 10485760"):
        fetch_sound(url.format(port=pages.server_port, folder=folder), folder / "allowed")


def test_sound_is_not_fetched_through_a_redirect_to_a_host_that_is_not_allowed(pages):
    before = len(pages.asked)
    assert fetch_sound(f"{pages.url}/to/localhost") == b""
    assert pages.asked[before:] == ["/to/localhost"]


def test_no_file_of_sound_is_read_without_an_allowed_folder(folder):
    with pytest.raises(RequestError, match="--allowed-local-media-path"):
        fetch_sound(f"file://{folder}/allowed/image.png")
