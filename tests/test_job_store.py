"""The store of video jobs: atomic files, bounds on count and age, and what a restart finds."""

import json
import time
from dataclasses import replace

import pytest

from omni_core.errors import ConfigError
from omni_core.http.files import LOCK
from omni_core.http.jobs import JobStore, VideoJob, new_job_id


def make_job(**fields):
    values = {"model": "m", "prompt": "p", "size": "32x32", "seconds": "1", "seed": 1, "created_at": int(time.time())}
    return VideoJob(id=new_job_id(), **{**values, **fields})


@pytest.fixture
def store(tmp_path):
    return JobStore(tmp_path / "videos", ttl=60, limit=3)


def completed(store, **fields):
    job = make_job(**fields)
    store.put(job)
    store.partial_file(job.id).write_bytes(b"video")
    store.complete(job.id, {"denoise": 1.0})
    return store.get(job.id)


def names(store):
    return sorted(path.name for path in store.folder.iterdir() if path.name != LOCK)


def test_a_job_is_what_was_put(store):
    job = make_job()
    store.put(job)
    assert store.get(job.id) == job
    assert store.list() == [job]
    assert json.loads((store.folder / f"{job.id}.json").read_text())["prompt"] == "p"


def test_a_job_that_cannot_be_written_is_not_there(store, monkeypatch):
    def full(job):
        raise OSError("no space left on device")

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(OSError, match="no space"):
        store.put(make_job())
    assert store.list() == []


def test_completing_moves_the_file_into_place(store):
    job = completed(store)
    assert (job.status, job.progress) == ("completed", 100)
    assert job.expires_at == job.completed_at + 60
    assert store.file(job.id).read_bytes() == b"video"
    assert names(store) == [f"{job.id}.json", f"{job.id}.mp4"], "nothing partial is left"


def test_failing_keeps_the_reason_and_no_file(store):
    job = make_job()
    store.put(job)
    store.partial_file(job.id).write_bytes(b"half")
    store.fail(job.id, "code", "why")
    assert store.get(job.id).error == {"code": "code", "message": "why"}
    assert names(store) == [f"{job.id}.json"]


def test_deleting_leaves_nothing(store):
    job = completed(store)
    store.delete(job.id)
    assert store.get(job.id) is None and names(store) == []


def test_the_oldest_ended_jobs_go_first_and_running_ones_stay(store):
    running = make_job()
    store.put(running)
    ended = [completed(store).id for _ in range(5)]
    assert [job.id for job in store.list()] == [running.id, *ended[2:]]
    assert not store.file(ended[0]).exists()


def test_an_ended_job_expires(tmp_path):
    store = JobStore(tmp_path, ttl=5, limit=10)
    job = completed(store)
    store.put(replace(job, completed_at=int(time.time()) - 10))
    assert store.get(job.id) is None and names(store) == []


def test_a_restart_finds_finished_jobs_and_fails_unfinished_ones(store):
    done, lost = completed(store), make_job(status="in_progress")
    store.put(lost)
    store.partial_file(lost.id).write_bytes(b"half")
    store.close()
    again = JobStore(store.folder, ttl=60, limit=3)
    assert again.get(done.id) == done
    assert again.get(lost.id).expires_at is not None
    assert again.get(lost.id).status == "failed"
    assert "restarted" in again.get(lost.id).error["message"]
    assert not again.partial_file(lost.id).exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"id": "x"}', '{"unknown": 1}'])
def test_a_file_that_is_no_job_does_not_stop_a_restart(store, content):
    job = completed(store)
    names = ["video_0.json", "video_notes.json", f"{new_job_id()}.json", "video_holiday.partial.mkv"]
    for name in names:
        (store.folder / name).write_text(content)
    store.close()
    assert [found.id for found in JobStore(store.folder, ttl=60, limit=3).list()] == [job.id]
    assert all((store.folder / name).exists() for name in names), "what is not ours is left alone"


def test_what_a_killed_server_was_writing_is_gone_after_a_restart(store):
    finished, lost = completed(store), new_job_id()
    for path in (store.passing_file(), store.partial_file(lost), store.folder / f"{lost}.partial.json"):
        path.write_bytes(b"half")
    (store.folder / "holiday.partial.mp4").write_bytes(b"the operator's")
    store.close()
    again = JobStore(store.folder, ttl=60, limit=3)
    assert names(again) == sorted([f"{finished.id}.json", f"{finished.id}.mp4", "holiday.partial.mp4"])


def test_a_finished_job_without_its_file_is_gone_after_a_restart(store):
    job = completed(store)
    store.file(job.id).unlink()
    store.close()
    assert JobStore(store.folder, ttl=60, limit=3).list() == []


@pytest.mark.parametrize("job_id", ["", "..", "../x", "video_", "video_" + "g" * 32, "video_" + "0" * 32 + "/../x"])
def test_only_ids_that_look_like_ours_are_looked_up(store, job_id):
    assert store.get(job_id) is None


def test_two_servers_cannot_share_a_store(store):
    with pytest.raises(ConfigError, match="in use by another server"):
        JobStore(store.folder, ttl=60, limit=3)
    store.close()
    JobStore(store.folder, ttl=60, limit=3).close()


def test_a_restart_keeps_the_order(store):
    ids = [completed(store).id for _ in range(3)]
    store.close()
    assert [job.id for job in JobStore(store.folder, ttl=60, limit=3).list()] == ids
