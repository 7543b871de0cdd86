"""Processes with a real agent: `owner NAME` serves its memory, `reader FILE` runs every scenario and writes JSON.

With `same_host` at the end both share their memory, and reads are plain copies.

An agent crashes in the interpreter's exit, so both end by `os._exit`, and none is ever made in the test process.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import psutil
import torch

from kv_store.transfer.nixl import NixlTransport
from kv_store.transfer.protocol import BlockTransport
from kv_store.transfer.same_host import SameHostTransport
from kv_store.transfer.shared_memory import SharedBuffer
from tests.child_process import die_with_parent, say
from tests.contract.transport_scenarios import SCENARIOS, SIZE, Owner, pattern

IDLE_S = 10.0


def make_transport(name: str, *, is_shared: bool, timeout_s: float = 5.0) -> tuple[BlockTransport, torch.Tensor]:
    if not is_shared:
        buffer = torch.zeros(SIZE, dtype=torch.uint8)
        return NixlTransport(name, buffer, timeout_s), buffer
    shared = SharedBuffer(SIZE)
    return SameHostTransport(NixlTransport(name, shared.tensor, timeout_s), shared.tensor, shared), shared.tensor


def serve_memory(name: str, *, is_shared: bool) -> None:
    """Answer lines on stdin: `fill SEED`, `readers N`; end with it."""
    transport, buffer = make_transport(name, is_shared=is_shared)
    say(f"metadata {transport.metadata().hex()}")
    for line in sys.stdin:
        command, value = line.split()
        if command == "fill":
            buffer.copy_(pattern(int(value)))
        else:
            transport.expect_readers(int(value))
        say("done")


class OwnerProcess:
    """An owner in a process of its own."""

    def __init__(self, name: str, *, is_shared: bool) -> None:
        self.agent_name = name
        self.metadata = b""
        how = ["same_host"] if is_shared else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.transport_process", "owner", name, *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def wait_ready(self) -> None:
        self.metadata = bytes.fromhex(await self._answer("metadata"))

    async def fill(self, seed: int) -> None:
        await self._ask(f"fill {seed}")

    async def expect_readers(self, num_readers: int) -> None:
        await self._ask(f"readers {num_readers}")

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.05)

    async def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    async def _ask(self, line: str) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()
        await self._answer("done")

    async def _answer(self, word: str) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        while True:
            line = await asyncio.wait_for(asyncio.to_thread(stdout.readline), 60)
            if not line:
                raise RuntimeError("the owner ended")
            first, _, rest = line.partition(" ")
            if first.strip() == word:
                return rest.strip()


class ProcessWorld:
    """The reader's transport here, owners elsewhere; spare owners start early, because an agent takes seconds."""

    num_restarts = 2

    def __init__(self, owner: OwnerProcess, spares: list[OwnerProcess], *, is_shared: bool) -> None:
        self.reader, self.local = make_transport("reader-0", is_shared=is_shared, timeout_s=2.0)
        self.maps_its_owners = is_shared
        self.owner: Owner = owner
        self._spares = spares

    async def start_owner(self) -> OwnerProcess:
        owner = self._spares.pop()
        await owner.wait_ready()
        return owner


async def idle_share(process: psutil.Process) -> float:
    """Share of one core that an idle process uses."""
    before = process.cpu_times()
    started_s = time.monotonic()
    await asyncio.sleep(IDLE_S)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - started_s)


async def run_scenarios(*, is_shared: bool) -> dict[str, str | float]:
    """Each scenario's name with "" or what went wrong, and the idle shares."""
    owner, *spares = [OwnerProcess(f"owner-{number}", is_shared=is_shared) for number in range(6)]
    results: dict[str, str | float] = {}
    try:
        await owner.wait_ready()
        world = ProcessWorld(owner, spares, is_shared=is_shared)
        for name, scenario in SCENARIOS.items():
            task = asyncio.ensure_future(scenario(world))
            done, _ = await asyncio.wait([task], timeout=60)
            fault = task.exception() if done else TimeoutError(name)
            results[name] = "".join(traceback.format_exception(fault)) if fault is not None else ""
        shares = await asyncio.gather(idle_share(psutil.Process()), idle_share(psutil.Process(owner.process.pid)))
        results["idle_reader"], results["idle_owner"] = shares
    finally:
        for each in (owner, *spares):
            each.process.kill()
            each.process.wait()
    return results


def main() -> None:
    die_with_parent()
    is_shared = sys.argv[-1] == "same_host"
    if sys.argv[1] == "owner":
        serve_memory(sys.argv[2], is_shared=is_shared)
    else:
        Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run_scenarios(is_shared=is_shared))))


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
