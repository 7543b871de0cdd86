"""One process of the registry's benchmark: a gateway that looks prompts up, and a few workers that publish.

It takes turns through our registry and through the bare commands, always with as many tasks, and so connections.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from benchmarks.bare_registry import BareCommands, BareRegistry, Batch
from benchmarks.registry_blocks import Population, fresh_keys
from benchmarks.turns import Done
from kv_store.registry.connection import ShardLimits
from kv_store.registry.protocol import Claimant, WorkerRecord
from kv_store.registry.publisher import BlockPublisher
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.shard import ShardFailure
from messages.errors import RegistryError
from messages.handoff import BlockKey

NAMESPACE = "bench"
PUBLISHED_TOGETHER = 16
"""Blocks per publish: what a prefill of 10,000 tokens/s completes in the 50 ms that a worker collects."""
TASKS = 4
"""Lookups, or publishes, in flight in each process."""
NUM_PROMPTS = 500
MOST_PUBLISHES_PER_S = 6000
"""So many are prepared per second of a turn."""
KEYS_FOR_EVERY_SHARD = 100
"""So many at random that no shard of a few is left out."""
LEASE_S = 3600.0
TIMEOUT_S = 20.0
"""Generous, as the machine is meant to be full; a command that fails all the same ends the benchmark."""

Kind = Literal["fill", "prepare", "lookup", "bare_lookup", "publish", "bare_publish"]
Action = Callable[[], Awaitable[bool]]
"""One operation; False when there is nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a client is told when it starts."""

    urls: Sequence[str]
    number: int
    """Of this client, from 0."""
    num_clients: int
    population: Population


def run_client(settings: Settings, pipe: Connection) -> None:
    """Do a turn for each (kind, seconds) that comes, until the other end closes; an exception is sent, and ends it."""
    asyncio.run(_serve(settings, pipe))


async def _serve(settings: Settings, pipe: Connection) -> None:
    async with AsyncExitStack() as stack:
        client = Client(settings)
        await client.open(stack)
        while True:
            try:
                kind, seconds = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            try:
                pipe.send(await client.take(kind, seconds))
            except Exception as error:
                pipe.send(error)
                raise


class Client:
    """A registry and bare connections to the same shards; each task has its own workers, and one bare connection."""

    def __init__(self, settings: Settings) -> None:
        self._population = settings.population
        self._draw = random.Random(settings.number)  # noqa: S311 - a load, not a secret
        limits = ShardLimits(timeout_s=TIMEOUT_S, max_connections=TASKS)
        self._registry = RedisRegistry(settings.urls, NAMESPACE, limits=limits, on_failure=_refuse)
        self._bare = [BareRegistry(settings.urls) for _ in range(TASKS)]
        self._commands = BareCommands(settings.urls, NAMESPACE)
        self._workers = range(settings.number, settings.population.num_workers, settings.num_clients)
        self._publishers = {number: BlockPublisher(self._registry, claimant(number)) for number in self._workers}
        self._bare_sequence = itertools.count(1)
        self._prompts: Iterator[list[BlockKey]] = iter(())
        self._bare_prompts: Iterator[list[Batch]] = iter(())

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect; `stack` disconnects."""
        await stack.enter_async_context(self._registry)
        for bare in self._bare:
            await stack.enter_async_context(bare)

    async def take(self, kind: Kind, seconds: float) -> Done:
        """Do one turn of about `seconds`; to fill and to prepare take as long as they take.

        Raises:
            RegistryError: The registry did not do, or did not find, what it should.
        """
        match kind:
            case "fill":
                return await self._fill()
            case "prepare":
                return await self._prepare()
            case "lookup":
                return await _repeat(seconds, [self._look_up] * TASKS)
            case "bare_lookup":
                return await _repeat(seconds, [self._bare_look_up(bare) for bare in self._bare])
            case "publish":
                return await self._publish(seconds)
            case "bare_publish":
                return await self._bare_publish(seconds)

    async def _fill(self) -> Done:
        """Register this client's workers and publish what they hold."""
        started_s = time.perf_counter()
        workers = iter(self._workers)
        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(self._fill_workers(workers))
        num_blocks = len(self._workers) * self._population.blocks_per_worker
        return Done(operations=num_blocks, elapsed_s=time.perf_counter() - started_s)

    async def _fill_workers(self, workers: Iterator[int]) -> None:
        for number in workers:
            await self._registry.register(record(number), lease_s=LEASE_S)
            self._publishers[number].note(list(self._population.held_by(number)), ())
            await self._publishers[number].flush()

    async def _prepare(self) -> Done:
        """Draw the prompts, once all clients have filled, and check that they are found as deep as they should be."""
        started_s = time.perf_counter()
        drawn = [self._population.prompt(self._draw) for _ in range(NUM_PROMPTS)]
        for keys, depth in drawn:
            hits = await self._registry.lookup(keys)
            if max(hits.by_worker.values(), default=0) != depth:
                raise RegistryError("a lookup found another prefix than was published", depth=depth, hits=hits)
        await self._introduce()
        versions = await self._bare[0].table_versions(self._commands)
        self._prompts = itertools.cycle([keys for keys, _ in drawn])
        self._bare_prompts = itertools.cycle([self._commands.lookup(keys, versions) for keys, _ in drawn])
        return Done(operations=NUM_PROMPTS, elapsed_s=time.perf_counter() - started_s)

    async def _introduce(self) -> None:
        """Let every shard hear of the workers in whose names the bare commands publish; the first time is dearer."""
        for number in self._workers:
            name, keys = claimant(number, prefix="bare"), fresh_keys(self._draw, KEYS_FOR_EVERY_SHARD)
            await self._bare[0].run(self._commands.publish(name, keys, next(self._bare_sequence)))
            await self._withdraw([(name, keys)])

    async def _look_up(self) -> bool:
        await self._registry.lookup(next(self._prompts))
        return True

    def _bare_look_up(self, bare: BareRegistry) -> Action:
        async def act() -> bool:
            await bare.lookup(next(self._bare_prompts))
            return True

        return act

    async def _publish(self, seconds: float) -> Done:
        """Publish fresh blocks as `Membership` does, for each task's workers in turn; then, untimed, take them back."""
        work = self._fresh(seconds)
        left, published = iter(work), []

        def publish_for(numbers: Sequence[int]) -> Action:
            publishers = itertools.cycle([(number, self._publishers[number]) for number in numbers])

            async def act() -> bool:
                number, publisher = next(publishers)
                keys = next(left, None)
                if keys is None:
                    return False
                publisher.note(keys, ())
                await publisher.flush()
                published.append((claimant(number), keys))
                return True

            return act

        done = await _repeat(seconds, [publish_for(self._workers[task::TASKS]) for task in range(TASKS)])
        if any(publisher.counts.resyncs for publisher in self._publishers.values()):
            raise RegistryError("a shard was filled again, so more was sent than was published")
        await self._withdraw(published)
        return done

    async def _bare_publish(self, seconds: float) -> Done:
        """Publish as many fresh blocks at a time as `_publish`, in the names of workers that only this does."""
        names = itertools.cycle([claimant(number, prefix="bare") for number in self._workers])
        work = [(next(names), keys) for keys in self._fresh(seconds)]
        batches = iter([self._commands.publish(name, keys, next(self._bare_sequence)) for name, keys in work])

        def publish_over(bare: BareRegistry) -> Action:
            async def act() -> bool:
                batch = next(batches, None)
                if batch is None:
                    return False
                await bare.run(batch)
                return True

            return act

        done = await _repeat(seconds, [publish_over(bare) for bare in self._bare])
        await self._withdraw(work[: done.operations])
        return done

    def _fresh(self, seconds: float) -> list[list[BlockKey]]:
        count = int(seconds * MOST_PUBLISHES_PER_S)
        return [fresh_keys(self._draw, PUBLISHED_TOGETHER) for _ in range(count)]

    async def _withdraw(self, published: Sequence[tuple[Claimant, list[BlockKey]]]) -> None:
        of_name: dict[Claimant, list[BlockKey]] = {}
        for name, keys in published:
            of_name.setdefault(name, []).extend(keys)
        for name, keys in of_name.items():
            await self._registry.withdraw(name.worker_id, name.incarnation, keys)


async def _repeat(seconds: float, actions: Sequence[Action]) -> Done:
    """Run a task per action, each again and again until the time is over."""
    latencies_s: list[float] = []
    started_s = time.perf_counter()

    async def repeat(action: Action) -> None:
        begun_s = time.perf_counter()
        while begun_s < started_s + seconds and await action():
            ended_s = time.perf_counter()
            latencies_s.append(ended_s - begun_s)
            begun_s = ended_s

    async with asyncio.TaskGroup() as group:
        for action in actions:
            group.create_task(repeat(action))
    elapsed_s = time.perf_counter() - started_s
    return Done(operations=len(latencies_s), elapsed_s=elapsed_s, latencies_s=tuple(latencies_s))


def claimant(number: int, prefix: str = "worker") -> Claimant:
    """Name the worker of this number."""
    return Claimant(worker_id=f"{prefix}-{number:02d}-a1b2c3d4", incarnation=f"{number:032x}")


def record(number: int) -> WorkerRecord:
    """Describe the worker of this number."""
    name = claimant(number)
    return WorkerRecord(
        worker_id=name.worker_id,
        incarnation=name.incarnation,
        address=f"10.0.0.{number}:9100",
        pool="unified",
        role="unified",
        model="bench",
        fingerprint="0" * 32,
        block_size=32,
        key_model="0" * 64,
        key_codec="raw",
        context_length=8192,
    )


def _refuse(failure: ShardFailure) -> None:
    raise RegistryError(
        "a shard did not do its part, so nothing can be measured", operation=failure.operation, reason=failure.reason
    )
