"""A worker in a process of its own, as in production but without Ray: real engine, NIXL, registry shards, sockets.

    python -m tests.integration.worker_process CONFIG.json POOL WORKER_ID PORT

It says `ready INCARNATION` on stdout, then answers lines on stdin: `faults PLAN` replaces what goes wrong on purpose,
`peers` tells how many other workers it knows.
It drains on SIGTERM, dies with its parent, and ends by `os._exit`: a process that made a NIXL agent must.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from deployments.config import FAULTS_VARIABLE, AppConfig, parse_config
from deployments.worker.parts import make_parts
from deployments.worker.runtime import WorkerRuntime
from messages.fault_plan import parse_faults
from messages.faults import Faults
from telemetry.logs import log_to_stderr
from tests.child_process import die_with_parent, say


class ReplaceableFaults(Faults):
    """Every point asks every time, so that a plan can come later; but preempting once is decided at the start."""

    def __init__(self, text: str) -> None:
        self.replace(text)

    def replace(self, text: str) -> None:
        super().__init__(parse_faults(text))
        self.is_set = True

    def has(self, prefix: str) -> bool:
        return prefix != "engine.preempt_once" or super().has(prefix)


async def answer(commands: asyncio.StreamReader, faults: ReplaceableFaults, runtime: WorkerRuntime) -> None:
    """Carry out what the test asks for."""
    async for line in commands:
        word, _, text = line.decode().strip().partition(" ")
        if word == "peers":
            peers = runtime._peers
            say(str(max(len(peers), peers._transport.num_peers)))
        else:
            faults.replace(text)
            say("ok")


async def run(config: AppConfig, pool_name: str, worker_id: str, port: str) -> None:
    pool = config.pool(pool_name)
    faults = ReplaceableFaults(os.environ.get(FAULTS_VARIABLE, ""))
    parts = await asyncio.to_thread(make_parts, config, pool, worker_id, faults)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    async with WorkerRuntime(config, pool, worker_id, "127.0.0.1", parts, int(port)) as runtime:
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        say(f"ready {runtime.describe()['incarnation']}")
        answering = asyncio.create_task(answer(commands, faults, runtime))
        await stopped.wait()
        answering.cancel()
        await runtime.drain(config.gateway.drain_s)


if __name__ == "__main__":
    die_with_parent()
    log_to_stderr()
    asyncio.run(run(parse_config(json.loads(Path(sys.argv[1]).read_text())), *sys.argv[2:]))
    os._exit(0)
