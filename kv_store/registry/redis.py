"""The registry over plain Redis or Valkey servers: blocks sharded by key, the worker table on every shard.

A block is a hash, `<namespace>/b/<block key>`, with a field per worker that holds it. The worker table is one hash,
`<namespace>/w`, whose leases run on the clock of the server that keeps them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, cast

from redis.asyncio.connection import parse_url

from kv_store.registry import scripts
from kv_store.registry.prefix_scan import PrefixScan, growing_batches
from kv_store.registry.protocol import PrefixHits, Tier, WorkerRecord
from kv_store.registry.scripts import Command
from kv_store.registry.shard import RegistryShard, Reply, ShardFailure, ShardLimits
from kv_store.registry.worker_table import TableCopy, merge
from kv_store.sharding import RendezvousSharding
from messages.errors import ConfigError, RegistryError
from messages.handoff import BlockKey

MAX_PIPELINE = 512
"""Writes per pipeline; a shard runs a pipeline's commands while others wait."""

Row = Mapping[str, str]
"""Incarnation by worker id, for one block."""


def shard_name(url: str) -> str:
    """Return host:port/db of a Redis URL: what places keys and labels metrics, without a password.

    Raises:
        ConfigError: Not a Redis URL.
    """
    try:
        parts = parse_url(url)
    except ValueError as error:
        raise ConfigError("a registry shard must be a redis:// or rediss:// URL", reason=str(error)) from error
    place = parts.get("path") or f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}"
    return f"{place}/{parts.get('db', 0)}"


def _ignore(failure: ShardFailure) -> None:
    del failure


class RedisRegistry:
    """A `Registry` that every process of a cluster shares; each makes its own, for one event loop."""

    def __init__(
        self,
        shards: Sequence[str],
        namespace: str = "default",
        *,
        limits: ShardLimits | None = None,
        entry_ttl_s: float = 4 * 3600.0,
        on_failure: Callable[[ShardFailure], None] = _ignore,
    ) -> None:
        """Connect lazily; nothing is sent yet.

        Args:
            shards: URLs, the same set in every process; the order does not matter.
            namespace: Registries of different namespaces do not see each other.
            limits: Timeout, cooldown and connections per shard.
            entry_ttl_s: Life of a published block that nobody publishes again. A backstop against owners that died;
                owners publish again in less.
            on_failure: Hears of everything that a shard did not do; must not block.

        Raises:
            ConfigError: No shard, a shard twice, a bad URL or a bad namespace.
        """
        if not namespace or "/" in namespace:
            raise ConfigError("a registry namespace is a non-empty string without '/'", namespace=namespace)
        names = [shard_name(url) for url in shards]
        self._sharding = RendezvousSharding(names)
        self._shards = [
            RegistryShard(name, url, limits or ShardLimits(), on_failure)
            for name, url in zip(names, shards, strict=True)
        ]
        self._copies = [TableCopy() for _ in names]
        self._block_prefix = f"kvferry/{namespace}/b/".encode()
        self._table_key = f"kvferry/{namespace}/w".encode()
        self._entry_ttl_ms = int(entry_ttl_s * 1000)

    async def register(self, record: WorkerRecord, *, lease_s: float) -> None:
        """Make the worker visible for `lease_s` from now; see `Registry.register`."""
        if not record.worker_id:
            raise ConfigError("a worker id is not empty")
        command = scripts.REGISTER(
            self._table_key, record.worker_id, record.incarnation, int(lease_s * 1000), record.to_json()
        )
        replies = await self._run("register", {index: [command] for index in range(len(self._shards))})
        answers = [reply for (reply,) in replies.values() if reply is not None]
        if not answers:
            raise RegistryError("no shard took the registration", worker_id=record.worker_id)
        if 0 in answers:
            raise RegistryError("another life of this worker has taken over", worker_id=record.worker_id)

    async def unregister(self, worker_id: str, incarnation: str) -> None:
        """Take this life of the worker away; any other life stays. A dead shard forgets it with the lease."""
        command = scripts.UNREGISTER(self._table_key, worker_id, incarnation)
        await self._run("unregister", {index: [command] for index in range(len(self._shards))})

    async def workers(self) -> list[WorkerRecord]:
        """Return the workers whose lease runs, by id; see `Registry.workers`."""
        live, _ = await self._read("workers", (), with_table=True)
        if live is None:
            raise RegistryError("no shard of the registry answers", num_shards=len(self._shards))
        return list(live.values())

    async def publish(
        self, worker_id: str, incarnation: str, keys: Sequence[BlockKey], *, tier: Tier = "device"
    ) -> None:
        """Say that the worker holds these complete blocks; see `Registry.publish`."""
        await self._write("publish", scripts.PUBLISH, keys, (worker_id, incarnation, tier, self._entry_ttl_ms))

    async def withdraw(self, worker_id: str, incarnation: str, keys: Sequence[BlockKey]) -> None:
        """Say that the worker holds these blocks no longer; see `Registry.withdraw`."""
        await self._write("withdraw", scripts.WITHDRAW, keys, (worker_id, incarnation))

    async def lookup(self, keys: Sequence[BlockKey]) -> PrefixHits:
        """Find who holds the longest prefix of `keys`; one round trip per batch, none after everybody's first miss."""
        scan: PrefixScan | None = None
        for batch in growing_batches(keys):
            live, rows = await self._read("lookup", batch, with_table=scan is None)
            if scan is None:
                if live is None:
                    return PrefixHits(unknown=True)
                scan = PrefixScan({worker_id: record.incarnation for worker_id, record in live.items()})
            scan.advance(rows)
            if not scan.is_open:
                break
        return PrefixHits() if scan is None else scan.hits()

    async def close(self) -> None:
        """Close every connection."""
        for shard in self._shards:
            await shard.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _write(
        self, operation: str, script: scripts.Script, keys: Sequence[BlockKey], args: tuple[str | int, ...]
    ) -> None:
        for start in range(0, len(keys), MAX_PIPELINE):
            batch = keys[start : start + MAX_PIPELINE]
            await self._run(
                operation,
                {
                    index: [script(self._block_prefix + batch[position], *args) for position in positions]
                    for index, positions in self._sharding.split(batch).items()
                },
            )

    async def _read(
        self, operation: str, keys: Sequence[BlockKey], *, with_table: bool
    ) -> tuple[dict[str, WorkerRecord] | None, list[Row | None]]:
        """Read the holders of `keys` and, in the same round trip, the worker table.

        Returns:
            The live workers, None when no shard answered or they were not asked for; and per key its holders, None
            when its shard did not answer.
        """
        now_s = time.monotonic()
        places = self._sharding.split(keys)
        commands: dict[int, list[Command]] = {
            index: [("HGETALL", self._block_prefix + keys[position]) for position in positions]
            for index, positions in places.items()
        }
        asked = list(self._copies)
        if with_table:
            for index, copy in enumerate(asked):
                ask = scripts.WORKERS(self._table_key, copy.version_to_ask(now_s))
                commands.setdefault(index, []).append(ask)
        replies = await self._run(operation, commands)
        live = self._take_tables(asked, replies, now_s) if with_table else None
        rows: list[Row | None] = [None] * len(keys)
        for index, positions in places.items():
            for position, reply in zip(positions, replies[index], strict=False):
                rows[position] = None if reply is None else _read_row(reply)
        return live, rows

    def _take_tables(
        self, asked: Sequence[TableCopy], replies: Mapping[int, Sequence[Reply | None]], asked_at_s: float
    ) -> dict[str, WorkerRecord] | None:
        # "Up to date" is said of the copy that was asked with, which another lookup may have replaced meanwhile.
        answered = {
            index: asked[index].updated(reply, asked_at_s)
            for index, (*_, reply) in replies.items()
            if reply is not None
        }
        for index, copy in answered.items():
            self._copies[index] = copy
        return merge(answered.values(), asked_at_s) if answered else None

    async def _run(self, operation: str, commands: Mapping[int, Sequence[Command]]) -> dict[int, list[Reply | None]]:
        async with asyncio.TaskGroup() as group:
            tasks = {
                index: group.create_task(self._shards[index].run(operation, of_shard))
                for index, of_shard in commands.items()
            }
        return {index: task.result() for index, task in tasks.items()}


def _read_row(reply: Reply) -> Row:
    # Value: expiry | tier | incarnation. A field that says anything else is nobody's claim.
    holders = {}
    for worker_id, value in cast("dict[bytes, bytes]", reply).items():
        parts = value.split(b"|", 2)
        if len(parts) == 3:
            holders[worker_id.decode()] = parts[2].decode()
    return holders
