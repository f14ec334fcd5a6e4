"""Results in shared memory: taken once, discarded when nobody takes them, swept when their owner has died."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from omni_core.diffusion.results import PREFIX, ResultFolder, ResultWriter, base_folder, discard_result
from omni_core.folders import sweep

FRAMES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)


def write_result(folder, request_id, frames, chunk=1):
    writer = ResultWriter(folder, request_id, len(frames), frames.dtype)
    for start in range(0, len(frames), chunk):
        writer.append(frames[start : start + chunk])
    return writer.finish()


@pytest.fixture
def folder(tmp_path):
    folder = ResultFolder(tmp_path)
    yield folder
    folder.close()


def test_a_result_is_taken_once_and_outlives_its_name(folder):
    path = write_result(folder.path, "a-12345678", FRAMES)
    taken = folder.take(path)
    np.testing.assert_array_equal(taken, FRAMES)
    assert folder.pending() == []
    with pytest.raises(FileNotFoundError):
        folder.take(path)


def test_a_path_outside_the_folder_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="not a result"):
        folder.take(write_result(tmp_path, "a", FRAMES))


def test_discarding_finds_a_result_by_the_front_ends_id(folder):
    for name in ("a-12345678", "a-87654321", "ab-12345678", "a-b-12345678"):
        write_result(folder.path, name, FRAMES)
    folder.discard("a")
    assert folder.pending() == ["a-b-12345678.npy", "ab-12345678.npy"]
    discard_result(folder.path, "ab-12345678")
    discard_result(folder.path, "ab-12345678")
    assert folder.pending() == ["a-b-12345678.npy"]


def test_closing_removes_everything(folder):
    write_result(folder.path, "a-12345678", FRAMES)
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_a_dead_owners_folder_is_swept_and_a_living_ones_is_not(folder, tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from omni_core.diffusion.results import ResultFolder;"
        "f = ResultFolder(Path(sys.argv[1])); (f.path / 'x.npy').write_bytes(b'x');"
        "print(f.path, flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    path = other.stdout.readline().strip()
    assert sweep(tmp_path, PREFIX) == []
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert [str(removed) for removed in sweep(tmp_path, PREFIX)] == [path]
    assert not os.path.exists(path) and folder.path.exists()


def test_a_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("OMNI_RESULTS_DIR", str(tmp_path / "elsewhere"))
    assert base_folder() == tmp_path / "elsewhere"
    folder = ResultFolder()
    assert folder.path.parent == tmp_path / "elsewhere"
    folder.close()


def test_frames_show_only_once_they_are_all_there(folder):
    writer = ResultWriter(folder.path, "a-12345678", 2, np.uint8)
    writer.append(FRAMES[:1])
    assert folder.pending() == ["a-12345678.partial"]
    with pytest.raises(ValueError, match="1 frames were decoded, 2 were asked for"):
        writer.finish()
    with pytest.raises(ValueError, match="3 frames"):
        writer.append(FRAMES)
    writer.append(FRAMES[1:])
    np.testing.assert_array_equal(folder.take(writer.finish()), FRAMES)


def test_abandoned_frames_are_gone(folder):
    writer = ResultWriter(folder.path, "a-12345678", 2, np.uint8)
    writer.append(FRAMES[:1])
    writer.abandon()
    assert folder.pending() == []
