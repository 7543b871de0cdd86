"""The registry's commands without the registry: what its lookups and publishes cost at least.

Written by hand on redis-py's connections and hiredis, below its client, pool and pipeline. Keys are placed on shards
and commands are worded before the clock runs; replies are read but not understood, beyond what ends a lookup early.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast
from urllib.parse import urlsplit

from hiredis import pack_command
from redis.asyncio import Connection

from kv_store.registry import scripts
from kv_store.registry.connection import shard_name
from kv_store.registry.protocol import Claimant
from kv_store.sharding import RendezvousSharding
from messages.handoff import BlockKey

Words = tuple[str | bytes | int, ...]
"""One command."""
Batch = Mapping[int, Sequence[Words]]
"""Commands by shard that go out together."""
ENTRY_TTL_MS, MEMORY_TTL_MS = 4 * 3600 * 1000, 3600 * 1000
EPOCH = "00112233445566ff"


class BareCommands:
    """Words for lookups and publishes, the same as `RedisRegistry` sends; the benchmark compares what servers count."""

    def __init__(self, urls: Sequence[str], namespace: str) -> None:
        self._sharding = RendezvousSharding([shard_name(url) for url in urls])
        self._shards = range(len(urls))
        self._block_prefix = f"kvferry/{namespace}/b/".encode()
        self._table_key = f"kvferry/{namespace}/w".encode()
        self._memory_key = f"kvferry/{namespace}/m".encode()

    def lookup(self, keys: Sequence[BlockKey], versions: Sequence[bytes]) -> list[Batch]:
        """Return batches of 32, 64, ... 512 blocks; the first asks each shard for the worker table too.

        Args:
            keys: Of the prompt.
            versions: Of the table, by shard; a shard that has no newer one says only that.
        """
        batches: list[Batch] = []
        start, size = 0, 32
        while start < len(keys):
            batch: dict[int, list[Words]] = {}
            for key in keys[start : start + size]:
                batch.setdefault(self._sharding.shard_of(key), []).append(("HGETALL", self._block_prefix + key))
            if start == 0:
                for shard, version in enumerate(versions):
                    batch.setdefault(shard, []).append(self._workers(version))
            batches.append(batch)
            start, size = start + size, min(2 * size, 512)
        return batches

    def publish(self, claimant: Claimant, keys: Sequence[BlockKey], sequence: int) -> Batch:
        """Return one batch for at most 512 blocks; the last command of each shard numbers it."""
        claim = (claimant.worker_id, claimant.incarnation, "device", ENTRY_TTL_MS, claimant.generation)
        mark = (claimant.worker_id, claimant.incarnation, sequence, EPOCH, MEMORY_TTL_MS)
        batch: dict[int, list[Words]] = {}
        for key in keys:
            words = ("EVALSHA", scripts.PUBLISH.digest, 1, self._block_prefix + key, *claim)
            batch.setdefault(self._sharding.shard_of(key), []).append(words)
        for commands in batch.values():
            commands.append(("EVALSHA", scripts.MARK.digest, 1, self._memory_key, *mark))
        return batch

    def tables(self) -> Batch:
        """Return what asks every shard for its whole worker table, whose first item is the version."""
        return {shard: [self._workers(b"")] for shard in self._shards}

    def _workers(self, version: bytes) -> Words:
        return ("EVALSHA", scripts.WORKERS.digest, 1, self._table_key, version)


class BareRegistry:
    """One connection to each shard, for one task."""

    def __init__(self, urls: Sequence[str]) -> None:
        places = [urlsplit(url) for url in urls]
        self._connections = [
            Connection(host=place.hostname or "localhost", port=place.port or 6379, protocol=2) for place in places
        ]

    async def lookup(self, batches: Sequence[Batch]) -> None:
        """Send batch after batch until one brings an empty reply: a block that nobody holds."""
        for batch in batches:
            replies = await self.run(batch)
            if not all(all(of_shard) for of_shard in replies.values()):
                return

    async def table_versions(self, commands: BareCommands) -> list[bytes]:
        """Return the version of the worker table on each shard."""
        replies = await self.run(commands.tables())
        return [cast("list[bytes]", replies[shard][0])[0] for shard in sorted(replies)]

    async def run(self, batch: Batch) -> dict[int, list[object]]:
        """Send each shard its commands, then read all replies.

        Raises:
            redis.ResponseError: A shard refused a command.
        """
        for shard, commands in batch.items():
            packed = b"".join([pack_command(cast("Any", words)) for words in commands])
            await self._connections[shard].send_packed_command(packed, check_health=False)
        return {
            shard: [await self._connections[shard].read_response() for _ in commands]
            for shard, commands in batch.items()
        }

    async def __aenter__(self) -> Self:
        for connection in self._connections:
            await connection.connect()  # type: ignore[no-untyped-call]  # redis-py's own gap
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for connection in self._connections:
            await connection.disconnect()
