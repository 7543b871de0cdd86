"""`kvferry serve` as a user runs it: it comes up, refuses a second one by port, ends and leaves nothing behind."""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deployments import watchdog
from deployments.preflight import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.nixl, pytest.mark.redis, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-c", "import deployments.cli; deployments.cli.main()", "serve", "--model", "demo"]
LABEL = "KVFERRY_TEST_LABEL"
UP_TIMEOUT_S = 150.0
GONE_TIMEOUT_S = 20.0
SHARED_MEMORY = "/dev/shm"  # noqa: S108  (only listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one test's processes live, so that they can be told from all others."""

    folder: Path
    label: str
    shared_memory: frozenset[str]

    def start(self, *options: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(self.folder), LABEL: self.label}
        return subprocess.Popen(
            [*COMMAND, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def leftovers(self) -> list[object]:
        marked = [process for process in psutil.process_iter() if label_of(process) == self.label]
        ray = watchdog.processes_of("none", str(self.folder))
        files = list(self.folder.iterdir())
        return [*marked, *ray, *files, *(set(os.listdir(SHARED_MEMORY)) - self.shared_memory)]


def label_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(LABEL)
    except psutil.Error:
        return None


@pytest.fixture
def place() -> Iterator[Place]:
    # Short, because Ray puts sockets into it.
    folder = Path(tempfile.mkdtemp(prefix="kvt", dir="/tmp"))
    made = Place(folder=folder, label=folder.name, shared_memory=frozenset(os.listdir(SHARED_MEMORY)))
    yield made
    for process in psutil.process_iter():
        if label_of(process) == made.label:
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_serve_comes_up_names_a_taken_port_and_ends_cleanly_on_ctrl_c(place: Place) -> None:
    grpc_port, http_port = free_ports(2)
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port))
    first = place.start(*ports)
    came_up = wait_for(lambda: first.poll() is not None or is_ready(http_port), UP_TIMEOUT_S) and first.poll() is None

    second = place.start(*ports)
    _, refusal = second.communicate(timeout=30)
    first.send_signal(signal.SIGINT)
    shown, complaint = first.communicate(timeout=60)

    assert came_up, complaint
    assert second.returncode == 1
    assert f"port {grpc_port}" in refusal
    assert "--grpc-port" in refusal
    assert "Traceback" not in refusal
    assert (first.returncode, complaint) == (0, "")
    assert f"http://127.0.0.1:{http_port}/v1" in shown
    assert place.leftovers() == []


def test_nothing_is_left_when_the_command_is_killed_while_it_starts(place: Place) -> None:
    grpc_port, http_port = free_ports(2)
    command = place.start("--grpc-port", str(grpc_port), "--http-port", str(http_port))
    wait_for(lambda: len(watchdog.processes_of("none", str(place.folder))) > 1, UP_TIMEOUT_S)

    command.kill()
    command.communicate(timeout=10)

    assert wait_for(lambda: place.leftovers() == [], GONE_TIMEOUT_S), place.leftovers()


def test_ctrl_c_while_it_starts_leaves_nothing(place: Place) -> None:
    grpc_port, http_port = free_ports(2)
    command = place.start("--grpc-port", str(grpc_port), "--http-port", str(http_port))
    wait_for(lambda: len(watchdog.processes_of("none", str(place.folder))) > 0, UP_TIMEOUT_S)

    command.send_signal(signal.SIGINT)
    _, complaint = command.communicate(timeout=60)

    assert (command.returncode, complaint) == (130, "")
    assert place.leftovers() == []


def test_a_worker_that_cannot_start_is_one_clear_line(place: Place) -> None:
    grpc_port, http_port = free_ports(2)
    command = place.start(
        "--grpc-port", str(grpc_port), "--http-port", str(http_port), "--set", "models.0.kv_memory_bytes=1"
    )

    _, complaint = command.communicate(timeout=UP_TIMEOUT_S)

    assert command.returncode == 1
    assert "did not start: models.0.kv_memory_bytes holds 0 tokens of KV" in complaint
    assert complaint.count("\n") == 1
    assert place.leftovers() == []
