"""Slots that nobody serves are asked for ever less often, by those who publish and by those who look up."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from kv_store.registry import cluster as cluster_module
from kv_store.registry.backoff import Backoff
from kv_store.registry.memory import SHARD, MemoryRegistry
from kv_store.registry.protocol import Claimant
from kv_store.registry.publisher import BlockPublisher, PublishLimits
from kv_store.registry.redis import RedisRegistry
from messages.handoff import BlockKey

KEYS = [BlockKey(bytes([number]) * 32) for number in range(20)]
LIMITS = PublishLimits(retry_s=0.5, most_retry_s=4.0, max_pending=32)


def test_each_pause_is_twice_the_one_before_up_to_a_bound() -> None:
    backoff = Backoff(first_s=0.5, most_s=3.0)
    pauses = []
    for _ in range(5):
        backoff.failed(10.0)
        pauses.append(backoff.due_s - 10.0)

    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert not backoff.is_due(12.9)
    assert backoff.is_due(13.0)

    backoff.succeeded()

    assert backoff.is_due(0.0)
    backoff.failed(10.0)
    assert backoff.due_s == 10.5


class HalfServed(MemoryRegistry):
    """Nobody keeps blocks of an odd number until `is_whole`; notes how many blocks it was asked about, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.is_whole = False
        self.asked: list[tuple[float, int]] = []

    async def spread(self, keys: Sequence[BlockKey]) -> dict[str, list[BlockKey]]:
        if keys:
            self.asked.append((self.now_s, len(keys)))
        served = [key for key in keys if self.is_whole or key[0] % 2 == 0]
        return {SHARD: served} if served else {}

    async def shards(self) -> tuple[str, ...]:
        return (SHARD,)


class Bench:
    def __init__(self) -> None:
        self.registry = HalfServed()
        claimant = Claimant(worker_id="a", incarnation="life-1")
        self.publisher = BlockPublisher(self.registry, claimant, LIMITS, lambda: self.registry.now_s)

    async def run_until(self, end_s: float) -> None:
        while self.registry.now_s < end_s:
            await self.publisher.flush()
            self.registry.now_s += 0.05


async def test_blocks_that_no_shard_keeps_are_asked_about_ever_less_often() -> None:
    bench = Bench()
    bench.publisher.note(KEYS, ())

    await bench.run_until(19.0)

    at_s = [at_s for at_s, _ in bench.registry.asked]
    gaps = [later - earlier for earlier, later in pairwise(at_s)]
    assert gaps == pytest.approx([0.5, 1.0, 2.0, 4.0, 4.0, 4.0], abs=0.11)
    assert [num_keys for _, num_keys in bench.registry.asked] == [20, *[10] * 6]
    assert bench.publisher.queue_depth == 10


async def test_what_is_new_does_not_wait_for_what_no_shard_keeps() -> None:
    bench = Bench()
    bench.publisher.note(KEYS[1:2], ())
    await bench.run_until(8.0)
    bench.registry.asked.clear()

    bench.publisher.note(KEYS[2:3], ())
    assert bench.publisher.wait_s == 0.0
    await bench.publisher.flush()

    assert bench.registry.asked == [(bench.registry.now_s, 1)]
    assert bench.publisher.queue_depth == 1
    assert 0.0 < (bench.publisher.wait_s or 0.0) <= 4.0


async def test_blocks_are_said_in_their_newest_state_when_somebody_keeps_them_again() -> None:
    """Rule 9: they wait, the newest state of each only, within the bound on what may wait."""
    bench = Bench()
    bench.publisher.note(KEYS, ())
    await bench.run_until(1.0)
    bench.publisher.note((), KEYS[1:2])
    await bench.run_until(8.0)
    bench.registry.is_whole = True

    await bench.run_until(8.0 + LIMITS.most_retry_s + 0.1)

    assert {key for key in KEYS if key in bench.registry._holders} == {*KEYS} - {KEYS[1]}
    assert bench.publisher.queue_depth == 0
    assert bench.publisher.wait_s is None


async def test_too_many_blocks_that_no_shard_keeps_are_dropped_with_their_generation() -> None:
    bench = Bench()
    many = [BlockKey(bytes([1]) + number.to_bytes(31, "big")) for number in range(LIMITS.max_pending + 1)]
    bench.publisher.note(many[:20], ())
    await bench.publisher.flush()

    has_new_generation = bench.publisher.note(many[20:], ())

    assert has_new_generation
    assert bench.publisher.queue_depth == 0


@asynccontextmanager
async def half_a_cluster(asked_at_s: list[float]) -> AsyncIterator[str]:
    """A node that knows masters of half of the slots only."""

    talks = set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            words = [(await reader.readline(), await reader.readline())[1].strip() for _ in range(int(line[1:]))]
            if words[:2] == [b"CLUSTER", b"SLOTS"]:
                asked_at_s.append(time.monotonic())
                port = b":%d" % writer.get_extra_info("sockname")[1]
                node = b"\r\n".join([b"*3", b"$9", b"127.0.0.1", port, b"$2", b"id"])
                writer.write(b"\r\n".join([b"*1", b"*3", b":0", b":8191", node, b""]))
            else:
                writer.write(b"-ERR not here\r\n")
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.create_task(answer(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*talks)


async def test_a_cluster_with_slots_that_nobody_serves_is_asked_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_module, "REFRESH_PERIOD_S", 0.04)
    monkeypatch.setattr(cluster_module, "MOST_REFRESH_PERIOD_S", 0.32)
    asked_at_s: list[float] = []
    async with half_a_cluster(asked_at_s) as url, RedisRegistry([url], "n", is_cluster=True) as registry:
        started_s = time.monotonic()
        while time.monotonic() < started_s + 1.4:
            assert len((await registry.spread(KEYS)).values()) == 1
            await asyncio.sleep(0.005)

    # At 0, 0.04, 0.12, 0.28, 0.6, 0.92 and 1.24 s at the earliest; without a pause that grows it would be 35 times.
    assert 3 <= len(asked_at_s) <= 7
