"""A spawned process ends with the one that started it, also before it has run anything of its own."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from omni_core.processes import ParentBound

PARENT = """
import multiprocessing, os, sys, time
from omni_core.processes import ParentBound

def wait(values):
    print("child", os.getpid(), values["stage"], flush=True)
    time.sleep(600)

if __name__ == "__main__":
    bound = ParentBound if sys.argv[1] == "bound" else dict
    multiprocessing.get_context("spawn").Process(target=wait, args=(bound(stage="talker"),)).start()
    time.sleep(600)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends the child")
@pytest.mark.parametrize("kind", ["bound", "plain"])
def test_a_child_ends_with_its_parent(tmp_path, kind):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), kind], stdout=subprocess.PIPE, text=True)
    _, pid, stage = parent.stdout.readline().split()
    assert stage == "talker" and alive(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and kind == "bound" and time.monotonic() < deadline:
        time.sleep(0.05)
    if kind == "plain":
        assert alive(pid), "the other case shows something only where a plain dictionary leaves the child alive"
        os.kill(int(pid), signal.SIGKILL)
    assert not (kind == "bound" and alive(pid))


def test_copies_within_a_process_bind_nothing():
    values = ParentBound(a=1)
    assert copy.deepcopy(values) == pickle.loads(pickle.dumps(values)) == {"a": 1}
    assert isinstance(copy.deepcopy(values), ParentBound)
