"""The registry over Redis or Valkey: blocks sharded by key, the worker table on every shard.

Leases run on the clock of the server that keeps them. Every script and every command touches one key, so plain servers
and a Redis Cluster look alike from here; what keys are called is in `key_names.py`.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, cast

from redis.exceptions import RedisError

from kv_store.registry import scripts
from kv_store.registry.cluster import ClusterShards
from kv_store.registry.connection import ShardAccess, ShardLimits, shard_name
from kv_store.registry.key_names import KeyNames, pairs
from kv_store.registry.prefix_scan import PrefixScan, growing_batches
from kv_store.registry.protocol import Claimant, PrefixHits, ShardMemory, Tier, WorkerRecord
from kv_store.registry.scripts import Command
from kv_store.registry.shard import Reply, ShardFailure, ShardHooks
from kv_store.registry.shard_source import PlainServers, Replies, ShardSource, ShardView
from kv_store.registry.sweeper import Sweeper
from kv_store.registry.worker_table import LiveWorker, TableCopy, lives, merge
from messages.errors import ConfigError, RegistryError
from messages.handoff import BlockKey

__all__ = ["MAX_PIPELINE", "RedisRegistry", "shard_name"]

MAX_PIPELINE = 512
"""Writes per pipeline; a shard runs a pipeline's commands while others wait."""
_MEMORY_TTL_MS = 3600 * 1000
"""A shard remembers the writes of a worker that is silent for so long."""

Row = Mapping[str, str]
"""Life by worker id, for one block."""


class RedisRegistry:
    """A `Registry` that every process of a cluster shares; each makes its own, for one event loop."""

    def __init__(  # noqa: PLR0913  (each is a setting of the deployment)
        self,
        shards: Sequence[str],
        namespace: str = "default",
        *,
        limits: ShardLimits | None = None,
        entry_ttl_s: float = 4 * 3600.0,
        access: ShardAccess | None = None,
        is_cluster: bool = False,
        on_failure: Callable[[ShardFailure], None] | None = None,
        hooks: ShardHooks | None = None,
    ) -> None:
        """Connect lazily; nothing is sent yet.

        Args:
            shards: URLs, the same set in every process; the order does not matter. Of a cluster, some of its nodes.
            namespace: Registries of different namespaces do not see each other.
            limits: Timeout, cooldown and connections per shard.
            entry_ttl_s: Life of a published block that nobody publishes again. A backstop against owners that died;
                owners publish again in less.
            access: User, password and TLS.
            is_cluster: Whether the URLs are nodes of one Redis Cluster.
            on_failure: Hears of everything that a shard did not do; must not block. Short for `hooks` with only that.
            hooks: Who hears of what shards do.

        Raises:
            ConfigError: No shard, a shard twice, a bad URL or a bad namespace.
        """
        if hooks is None:
            hooks = ShardHooks() if on_failure is None else ShardHooks(on_failure=on_failure)
        self.names = KeyNames(namespace)
        access, limits = access or ShardAccess(), limits or ShardLimits()
        self.source: ShardSource = (
            ClusterShards(shards, access, limits, hooks, self.names.block)
            if is_cluster
            else PlainServers(shards, access, limits, hooks)
        )
        self._hooks = hooks
        self._copies: dict[str, TableCopy] = {}
        self._entry_ttl_ms = int(entry_ttl_s * 1000)
        self._sweeper = Sweeper(self.source, self.names, self._live_lives)

    @property
    def num_silent(self) -> int:
        """Shards that did not answer when they were last asked."""
        return self.source.num_silent

    async def register(self, record: WorkerRecord, *, lease_s: float) -> dict[str, ShardMemory]:
        """Make the worker visible for `lease_s` from now; see `Registry.register`."""
        if not record.worker_id:
            raise ConfigError("a worker id is not empty")
        lease_ms = int(lease_s * 1000)
        view = await self.source.view()
        commands: dict[int, list[Command]] = {}
        for index, home in enumerate(view.homes):
            table, memory = self.names.table(home), self.names.memory(home)
            commands[index] = [
                scripts.REGISTER(table, record.worker_id, record.incarnation, lease_ms, record.to_json()),
                self._mark(memory, record.worker_id, record.incarnation, 0),
            ]
        replies = await self.source.run("register", view, commands)
        answers = {view.ids[index]: (taken, memory) for index, (taken, memory) in replies.items() if taken is not None}
        if not answers:
            raise RegistryError("no shard took the registration", worker_id=record.worker_id)
        if any(taken == 0 for taken, _ in answers.values()):
            raise RegistryError("another life of this worker has taken over", worker_id=record.worker_id)
        return {
            shard: _read_memory(memory, is_new=taken == 2)
            for shard, (taken, memory) in answers.items()
            if memory is not None
        }

    async def unregister(self, worker_id: str, incarnation: str) -> None:
        """Take this life of the worker away; any other life stays. A dead shard forgets it with the lease."""
        view = await self.source.view()
        commands = {
            index: [scripts.UNREGISTER(self.names.table(home), worker_id, incarnation)]
            for index, home in enumerate(view.homes)
        }
        await self.source.run("unregister", view, commands)

    async def workers(self) -> list[WorkerRecord]:
        """Return the workers whose lease runs, by id; see `Registry.workers`."""
        return [row.record for row in await self.rows()]

    async def rows(self) -> list[LiveWorker]:
        """Return what `workers` returns with the leases, which end on the clock of time.monotonic().

        Raises:
            RegistryError: No shard answers, so nothing is known.
        """
        live, _ = await self._read("workers", (), with_table=True)
        if live is None:
            raise RegistryError("no shard of the registry answers", num_silent=self.num_silent)
        return list(live.values())

    async def shards(self) -> tuple[str, ...]:
        """Return the present shards by name; none while they are not known."""
        return (await self.source.view()).ids

    async def spread(self, keys: Sequence[BlockKey]) -> dict[str, list[BlockKey]]:
        """Return, per shard, which of `keys` it keeps; see `Registry.spread`."""
        view = await self.source.view()
        places = view.placement.split(keys)
        return {view.ids[index]: [keys[position] for position in positions] for index, positions in places.items()}

    async def write(
        self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
    ) -> ShardMemory | None:
        """Say what became of blocks that `shard` keeps; see `Registry.write`."""
        view = await self.source.view()
        if shard not in view.ids:
            return None
        index = view.ids.index(shard)
        commands = [self._change(key, tier, claimant) for key, tier in changes.items()]
        # It comes last, so a shard that has it has all that comes before.
        memory = self.names.memory(view.homes[index])
        commands.append(self._mark(memory, claimant.worker_id, claimant.incarnation, sequence))
        operation = "publish" if any(tier is not None for tier in changes.values()) else "withdraw"
        replies = (await self.source.ask(operation, view, {index: commands}))[index]
        # In a cluster, a part of the batch may have gone to another server, which did not answer.
        is_whole = None not in replies and not isinstance(replies[-1], RedisError)
        return _read_memory(replies[-1]) if is_whole else None

    async def publish(
        self,
        worker_id: str,
        incarnation: str,
        keys: Sequence[BlockKey],
        *,
        tier: Tier = "device",
        generation: int = 0,
    ) -> None:
        """Say that the worker holds these complete blocks; see `Registry.publish`."""
        args = (worker_id, incarnation, tier, self._entry_ttl_ms, generation)
        await self._write_all("publish", [scripts.PUBLISH(self.names.block(key), *args) for key in keys], keys)

    async def withdraw(self, worker_id: str, incarnation: str, keys: Sequence[BlockKey]) -> None:
        """Say that the worker holds these blocks no longer; see `Registry.withdraw`."""
        commands = [scripts.WITHDRAW(self.names.block(key), worker_id, incarnation) for key in keys]
        await self._write_all("withdraw", commands, keys)

    async def lookup(self, keys: Sequence[BlockKey]) -> PrefixHits:
        """Find who holds the longest prefix of `keys`; one round trip per batch, none after everybody's first miss."""
        scan: PrefixScan | None = None
        for batch in growing_batches(keys):
            live, rows = await self._read("lookup", batch, with_table=scan is None)
            if scan is None:
                if live is None:
                    break
                scan = PrefixScan(lives(row.record for row in live.values()))
            scan.advance(rows)
            if not scan.is_open:
                break
        hits = PrefixHits(unknown=bool(keys)) if scan is None else scan.hits()
        if keys:
            self._hooks.on_lookup(hits)
        if scan is not None and scan.num_stale:
            self._hooks.on_stale("lookup", scan.num_stale)
        return hits

    async def tend(self) -> None:
        """Do a bounded part of the cleaning up; see `Registry.tend`."""
        num_dropped = await self._sweeper.tick()
        if num_dropped:
            self._hooks.on_stale("sweep", num_dropped)

    async def close(self) -> None:
        """Close every connection."""
        await self.source.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _change(self, key: BlockKey, tier: Tier | None, claimant: Claimant) -> Command:
        name, worker_id, incarnation = self.names.block(key), claimant.worker_id, claimant.incarnation
        if tier is None:
            return scripts.WITHDRAW(name, worker_id, incarnation)
        return scripts.PUBLISH(name, worker_id, incarnation, tier, self._entry_ttl_ms, claimant.generation)

    @staticmethod
    def _mark(memory: bytes, worker_id: str, incarnation: str, sequence: int) -> Command:
        return scripts.MARK(memory, worker_id, incarnation, sequence, secrets.token_hex(8), _MEMORY_TTL_MS)

    async def _write_all(self, operation: str, commands: Sequence[Command], keys: Sequence[BlockKey]) -> None:
        for start in range(0, len(keys), MAX_PIPELINE):
            view = await self.source.view()
            batch = keys[start : start + MAX_PIPELINE]
            places = view.placement.split(batch)
            num_uncovered = len(batch) - sum(len(positions) for positions in places.values())
            if num_uncovered:
                self._hooks.on_failure(_uncovered(operation, num_uncovered))
            of_shard = {index: [commands[start + i] for i in positions] for index, positions in places.items()}
            await self.source.run(operation, view, of_shard)

    async def _read(
        self, operation: str, keys: Sequence[BlockKey], *, with_table: bool
    ) -> tuple[dict[str, LiveWorker] | None, list[Row | None]]:
        """Read the holders of `keys` and, in the same round trip, the worker table.

        Returns:
            The live workers, None when no shard answered or they were not asked for; and per key its holders, None
            when its shard did not answer.
        """
        now_s = time.monotonic()
        view = await self.source.view()
        places = view.placement.split(keys)
        commands: dict[int, list[Command]] = {
            index: [("HGETALL", self.names.block(keys[position])) for position in positions]
            for index, positions in places.items()
        }
        asked = [self._copies.get(shard, TableCopy()) for shard in view.ids]
        if with_table:
            for index, copy in enumerate(asked):
                ask = scripts.WORKERS(self.names.table(view.homes[index]), copy.version_to_ask(now_s))
                commands.setdefault(index, []).append(ask)
        replies = await self.source.run(operation, view, commands)
        live = self._take_tables(view, asked, replies, now_s) if with_table else None
        rows: list[Row | None] = [None] * len(keys)
        for index, positions in places.items():
            for position, reply in zip(positions, replies[index], strict=False):
                rows[position] = None if reply is None else _read_row(reply)
        return live, rows

    def _take_tables(
        self, view: ShardView, asked: Sequence[TableCopy], replies: Replies, asked_at_s: float
    ) -> dict[str, LiveWorker] | None:
        # "Up to date" is said of the copy that was asked with, which another lookup may have replaced meanwhile.
        answered = {
            view.ids[index]: asked[index].updated(reply, asked_at_s)
            for index, (*_, reply) in replies.items()
            if reply is not None
        }
        # Shards that have left the cluster take their copies with them.
        self._copies = {shard: self._copies[shard] for shard in view.ids if shard in self._copies} | answered
        return merge(answered.values(), asked_at_s) if answered else None

    async def _live_lives(self) -> dict[str, str] | None:
        live, _ = await self._read("workers", (), with_table=True)
        return None if live is None else lives(row.record for row in live.values())


def _read_row(reply: Reply) -> Row:
    holders = {}
    for worker_id, value in pairs(reply):
        # As Claim.read does; this is the hot part of a lookup.
        parts = value.split(b"|", 2)
        if len(parts) == 3:
            holders[worker_id.decode()] = parts[2].decode()
    return holders


def _read_memory(reply: Reply, *, is_new: bool = False) -> ShardMemory:
    epoch, sequence = cast("tuple[bytes, int]", reply)
    return ShardMemory(epoch=epoch.decode(), sequence=sequence, is_new=is_new)


def _uncovered(operation: str, num_commands: int) -> ShardFailure:
    return ShardFailure(shard="cluster", operation=operation, reason="uncovered", num_commands=num_commands)
