"""The store of video jobs: atomic files, bounds on count and age, and what a restart finds."""

import json
import time
from dataclasses import replace

import pytest

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
    return sorted(path.name for path in store.folder.iterdir())


def test_a_job_is_what_was_put(store):
    job = make_job()
    store.put(job)
    assert store.get(job.id) == job
    assert store.list() == [job]
    assert json.loads((store.folder / f"{job.id}.json").read_text())["prompt"] == "p"


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
    again = JobStore(store.folder, ttl=60, limit=3)
    assert again.get(done.id) == done
    assert again.get(lost.id).status == "failed"
    assert "restarted" in again.get(lost.id).error["message"]
    assert not again.partial_file(lost.id).exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"id": "x"}', '{"unknown": 1}'])
def test_a_file_that_is_no_job_does_not_stop_a_restart(store, content):
    job = completed(store)
    (store.folder / "video_0.json").write_text(content)
    assert [found.id for found in JobStore(store.folder, ttl=60, limit=3).list()] == [job.id]


def test_a_finished_job_without_its_file_is_gone_after_a_restart(store):
    job = completed(store)
    store.file(job.id).unlink()
    assert JobStore(store.folder, ttl=60, limit=3).list() == []


@pytest.mark.parametrize("job_id", ["", "..", "../x", "video_", "video_" + "g" * 32, "video_" + "0" * 32 + "/../x"])
def test_only_ids_that_look_like_ours_are_looked_up(store, job_id):
    assert store.get(job_id) is None
