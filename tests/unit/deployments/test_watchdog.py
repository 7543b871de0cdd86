"""Processes of a stack are found by their mark and ended; others are left alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

from deployments import watchdog

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def sleeper(mark: str | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(SLEEP, env={watchdog.MARK: mark} if mark else {})


def wait_until_marked(mark: str, folder: Path) -> None:
    # Between fork and exec a child still has our environment.
    deadline_s = time.monotonic() + 5
    while not watchdog.processes_of(mark, str(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def test_sweep_ends_the_marked_and_spares_the_others_and_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "stack"
    folder.mkdir()
    mark = f"mark-{os.getpid()}"
    marked, other = sleeper(mark), sleeper()
    wait_until_marked(mark, folder)

    try:
        killed = watchdog.sweep(mark, str(folder), grace_s=0.0)

        assert killed == [marked.pid]
        assert marked.wait(5) == -9
        assert other.poll() is None
        assert not folder.exists()
    finally:
        marked.kill()
        other.kill()
        marked.wait()
        other.wait()


def test_sweep_of_nothing_ends_at_once(tmp_path: Path) -> None:
    assert watchdog.sweep("nobody", str(tmp_path / "none"), grace_s=60.0) == []


def test_the_watchdog_acts_when_its_input_closes(tmp_path: Path) -> None:
    folder = tmp_path / "stack"
    folder.mkdir()
    command = [sys.executable, "-I", "-S", watchdog.__file__, "nobody-has-this-mark", str(folder)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, env={})
    before = guard.poll(), folder.exists()

    guard.communicate(timeout=10)

    assert before == (None, True)
    assert guard.returncode == 0
    assert not folder.exists()
