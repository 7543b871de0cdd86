"""A system that has nothing to do leaves the machine alone."""

import time

import psutil
import pytest

from deployments.local_stack import LocalStack

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.nixl, pytest.mark.timeout(300)]

MAX_SHARE_OF_A_CORE = 0.05
WINDOW_S = 8.0


def replicas(deployment: str) -> list[psutil.Process]:
    title = f"ServeReplica:kvferry:{deployment}"
    return [process for process in psutil.process_iter(["cmdline"]) if title in " ".join(process.info["cmdline"] or [])]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def test_idle_workers_use_at_most_a_twentieth_of_a_core(disaggregated: LocalStack) -> None:
    workers = [process for deployment in ("prefill", "decode") for process in replicas(deployment)]
    assert len(workers) == 2
    # What started just now, or served the test before, comes to rest first.
    time.sleep(3.0)

    before = [cpu_seconds(worker) for worker in workers]
    time.sleep(WINDOW_S)
    shares = [(cpu_seconds(worker) - start) / WINDOW_S for worker, start in zip(workers, before, strict=True)]

    print(f"idle CPU of the workers, shares of a core: {shares}")
    assert max(shares) <= MAX_SHARE_OF_A_CORE
