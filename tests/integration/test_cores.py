"""Cores, niceness and torch's threads, looked at from outside a process that has several threads already."""

import json
import os
import subprocess
import sys

import psutil
import pytest

# The processes import torch and transformers, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor

cores, num_threads, nice = json.loads(sys.argv[1])
sleeping = threading.Event()
threading.Thread(target=sleeping.wait, daemon=True).start()

from deployments.config import PoolConfig
from deployments.worker.cores import bind_process
from engine.model_runner import configure_threads
import torch

pool = PoolConfig(name="p", role="unified", cpu_affinity=cores, num_threads=num_threads, nice=nice)

def load():
    configure_threads(pool.threads(bind_process(pool.cpu_affinity, pool.nice)))
    torch.ones(600, 600) @ torch.ones(600, 600)

def step():
    before = set(os.listdir("/proc/self/task"))
    torch.exp(torch.ones(4_000_000))
    return torch.get_num_threads(), len(set(os.listdir("/proc/self/task")) - before)

with ThreadPoolExecutor(1) as loader:
    loader.submit(load).result()
# As the engine's step thread: started by a thread that did not load.
with ThreadPoolExecutor(1) as engine:
    print(json.dumps([os.getpid(), *engine.submit(step).result()]), flush=True)
    sys.stdin.read()
"""


def watched(cores: list[int] | None, num_threads: int, nice: int) -> tuple[list[set[int]], list[int], int, int]:
    """Affinity and niceness of every thread; threads that torch says it uses; threads that its first step starts."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps([cores, num_threads, nice])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ray sets this in its processes.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pid, seen, started = json.loads(process.stdout.readline())
        threads = [thread.id for thread in psutil.Process(pid).threads()]
        places = [os.sched_getaffinity(thread) for thread in threads]
        levels = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
    finally:
        process.stdin.close()
        process.wait()
    return places, levels, seen, started


def test_every_thread_stays_on_the_cores_and_gives_way() -> None:
    core = min(os.sched_getaffinity(0))

    places, levels, seen, started = watched([core], 1, 3)

    assert len(places) >= 3
    assert {frozenset(place) for place in places} == {frozenset({core})}
    assert set(levels) == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)}
    assert (seen, started) == (1, 0)


def test_the_step_thread_computes_with_the_configured_number_of_threads() -> None:
    places, levels, seen, started = watched(None, 2, 0)

    # The step thread itself, and one more that computes with it.
    assert (seen, started) == (2, 1)
    assert {frozenset(place) for place in places} == {frozenset(os.sched_getaffinity(0))}
    assert set(levels) == {os.getpriority(os.PRIO_PROCESS, 0)}
