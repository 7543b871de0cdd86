"""Agents that come, go, and cannot start, with the real transport in processes of their own (cases 2, 3 and 24)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

START = """
import os, time, torch
from kv_store.transfer.nixl import NixlTransport
from messages.errors import TransferError
started_s = time.monotonic()
try:
    NixlTransport("worker/1", torch.zeros(4096, dtype=torch.uint8))
except TransferError as error:
    print(time.monotonic() - started_s, error, flush=True)
    os._exit(7)
os._exit(0)
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    quiet = {"UCX_LOG_LEVEL": "fatal", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **quiet, **environment},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.nixl
@pytest.mark.timeout(180)
def test_twenty_lives_of_a_peer_leave_no_registration_behind(tmp_path: Path) -> None:
    """Cases 2 and 3."""
    results = tmp_path / "results.json"

    ended = run(["-m", "tests.contract.restart_process", str(results)])

    assert ended.returncode == 0, ended.stderr
    seen = json.loads(results.read_text())
    assert seen["peers"] == [1] * 20
    assert seen["after"] == [0] * 20
    # The first lives make threads and buffers that stay.
    assert seen["mapped"][-1] <= seen["mapped"][4] + 5


@pytest.mark.nixl
def test_a_transport_that_cannot_start_says_so_soon() -> None:
    """Case 24: with its reason, in less than 10 s."""
    ended = run(["-c", START], UCX_TLS="no_such_transport")

    assert ended.returncode == 7, ended.stderr
    seconds, _, reason = ended.stdout.partition(" ")
    assert "transfer" in reason
    assert "NIXL_ERR_BACKEND" in reason
    assert float(seconds) < 10
