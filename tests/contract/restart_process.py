"""A reader whose peer dies and comes back many times, each life with a real agent in a process of its own.

Lives are forked from a process that has imported everything but made no agent, so that each costs half a second.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from kv_store.transfer.bounded import BoundedTransport
from kv_store.transfer.nixl import NixlTransport
from kv_store.transfer.protocol import ByteRange
from messages.errors import TransferError
from tests.contract.transport_process import die_with_parent
from tests.contract.transport_scenarios import SIZE, pattern

NUM_LIVES = 20


def live(name: str, pipe: Connection) -> None:
    """One life: fill the memory, say how to reach it, wait for death."""
    die_with_parent()
    buffer = pattern(7)
    transport = NixlTransport(name, buffer)
    pipe.send_bytes(transport.metadata())
    time.sleep(600)
    os._exit(0)


async def run_lives() -> dict[str, list[int]]:
    """Per life: registrations while it lived, and mapped files of peers in this process after its death."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.contract.restart_process"])
    local = torch.zeros(SIZE, dtype=torch.uint8)
    inner = NixlTransport("reader/0", local, connect_timeout_s=5.0)
    reader = BoundedTransport(inner, max_peers=4)
    results: dict[str, list[int]] = {"peers": [], "after": [], "mapped": []}
    whole = [ByteRange(remote_offset=0, local_offset=0, size=SIZE)]
    for number in range(NUM_LIVES):
        here, there = context.Pipe()
        name = f"prefill-0/{number}"
        process = context.Process(target=live, args=(name, there))
        process.start()
        metadata = here.recv_bytes()
        await reader.connect(name, metadata)
        local.zero_()
        await reader.read(name, whole, deadline_s=20)
        if not torch.equal(local, pattern(7)):
            raise RuntimeError("other bytes arrived")
        results["peers"].append(inner.num_peers)
        process.kill()
        process.join()
        try:
            await reader.read(name, whole, deadline_s=10)
        except TransferError:
            pass
        else:
            raise RuntimeError("a dead peer was read")
        await reader.disconnect(name)
        results["after"].append(inner.num_peers)
        results["mapped"].append(len(psutil.Process().memory_maps(grouped=False)))
    return results


def main() -> None:
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(run_lives())))


if __name__ == "__main__":
    status = 1
    try:
        die_with_parent()
        main()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
