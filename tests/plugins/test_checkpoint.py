"""A checkpoint's configuration files: read when asked for, once, and every failure is one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_core.checkpoint import Checkpoint
from omni_core.errors import CheckpointError


def test_files_are_read_once_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text('\ufeff{"num_layers": 2}', encoding="utf-8")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read("config.json") == {}
    assert checkpoint.read_component("transformer") == {"num_layers": 2}
    assert checkpoint.read_component("vae") == {}
    (tmp_path / "transformer" / "config.json").unlink()
    assert checkpoint.read_component("transformer") == {"num_layers": 2}
    assert checkpoint.local_path() == tmp_path


@pytest.mark.parametrize(
    "content, reason",
    [
        (b'{"model_type": ', "config.json is not valid JSON"),
        (b"", "config.json is not valid JSON"),
        (b"\xff\xfe\x00", "config.json is not valid JSON"),
        (b"[1, 2]", "config.json must hold a JSON object, not list"),
        (b"[" * 100_000, "config.json is not valid JSON"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        Checkpoint(tmp_path).read("config.json")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read config\.json"):
        Checkpoint(tmp_path).read("config.json")


@pytest.mark.parametrize("file", ["../secret.json", "/etc/passwd", "a/../../b"])
def test_nothing_outside_the_checkpoint_is_read(tmp_path: Path, file: str) -> None:
    with pytest.raises(ValueError, match="not a path below"):
        Checkpoint(tmp_path).read(file)


@pytest.mark.parametrize("source", ["/no/such/folder", "./nothing", "a/b/c", "~/nothing-here", "", "two words"])
def test_a_folder_that_is_not_there_is_one_clear_line(source: str) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        Checkpoint(source)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is a file; give the folder that holds config\.json"):
        Checkpoint(tmp_path / "model.safetensors")


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a folder, which has no revision 'main'"):
        Checkpoint(tmp_path, "main")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Let the hub's client answer with files, with an exception of its own, or from a cache."""
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def answer(files: dict[str, str], error: Exception | None = None, cached: tuple[str, ...] = ()) -> None:
        def download(repository: str, file: str, *, revision: str | None) -> str:
            assert (repository, revision) == ("owner/name", "v1")
            if file in files:
                (tmp_path / file).write_text(files[file])
                return os.fspath(tmp_path / file)
            raise error or huggingface_hub.errors.EntryNotFoundError(file)

        def snapshot(repository: str, *, revision: str | None) -> str:
            if error is not None:
                raise error
            return os.fspath(tmp_path)

        def from_cache(repository: str, file: str, *, revision: str | None) -> str | None:
            return file if file in cached else None

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", from_cache)

    return answer


def test_a_hub_id_fetches_only_what_is_read(hub: Callable[..., None], tmp_path: Path) -> None:
    hub({"config.json": '{"model_type": "toy"}'})
    checkpoint = Checkpoint("owner/name", "v1")
    assert checkpoint.folder is None
    assert checkpoint.read("config.json") == {"model_type": "toy"}
    assert checkpoint.read("model_index.json") == {}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert checkpoint.local_path() == tmp_path


def hub_error(name: str) -> Exception:
    """An exception of the hub's client, made without a connection."""
    from huggingface_hub import errors

    kind = getattr(errors, name)
    if not issubclass(kind, errors.HfHubHTTPError):
        made: Exception = kind(name)
        return made
    request: Any = SimpleNamespace(url="", method="GET")
    return kind(name, response=SimpleNamespace(headers={}, request=request, status_code=404))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("RepositoryNotFoundError", "there is no such folder and no such repository on the hub"),
        ("GatedRepoError", "is gated: accept its terms on the hub and set HF_TOKEN"),
        ("RevisionNotFoundError", "the repository has no revision 'v1'"),
        ("LocalEntryNotFoundError", "the hub cannot be reached; go online once"),
        ("OfflineModeIsEnabled", "the hub cannot be reached; go online once"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(hub: Callable[..., None], name: str, reason: str) -> None:
    hub({}, hub_error(name))
    checkpoint = Checkpoint("owner/name", "v1")
    for use in (lambda: checkpoint.read("config.json"), checkpoint.local_path):
        with pytest.raises(CheckpointError, match=reason) as caught:
            use()
        assert str(caught.value).startswith("checkpoint 'owner/name' at revision 'v1'")
        assert "\n" not in str(caught.value)


def test_offline_a_file_that_a_cached_repository_lacks_is_not_there(hub: Callable[..., None]) -> None:
    hub({"model_index.json": "{}"}, hub_error("LocalEntryNotFoundError"), cached=("model_index.json",))
    assert Checkpoint("owner/name", "v1").read("config.json") == {}
