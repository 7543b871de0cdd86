"""Where shards come from, and which of them keeps a key: fixed servers here, a Redis Cluster in `cluster.py`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_store.registry.connection import ShardAccess, ShardAddress, ShardLimits
from kv_store.registry.scripts import Command
from kv_store.registry.shard import RegistryShard, Reply, ShardHooks
from kv_store.sharding import RendezvousSharding
from messages.handoff import BlockKey

Commands = Mapping[int, Sequence[Command]]
"""By index of the shard."""
Replies = dict[int, list[Reply | None]]


class Placement(Protocol):
    """Says which shard keeps a key."""

    def split(self, keys: Sequence[BlockKey]) -> dict[int, list[int]]:
        """Return, per shard that keeps any of `keys`, the positions of its keys, ascending."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """The shards as they are now; a later view may have others."""

    shards: tuple[RegistryShard, ...]
    ids: tuple[str, ...]
    """Which part of the data each shard keeps; stays when another server takes the part over."""
    homes: tuple[bytes, ...]
    """What the name of a key ends with that must lie on the shard; see `key_names.py`."""
    placement: Placement


class ShardSource(Protocol):
    """A set of shards and the way to talk to them."""

    async def view(self) -> ShardView:
        """Return the present shards; none when they are not known."""
        ...

    async def run(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands on shards of `view` at once; None for every reply that a shard did not give."""
        ...

    @property
    def num_silent(self) -> int:
        """Shards whose last pipeline got no answer."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class PlainServers:
    """A fixed list of servers; every process that has the same list agrees on the place of every key."""

    def __init__(self, urls: Sequence[str], access: ShardAccess, limits: ShardLimits, hooks: ShardHooks) -> None:
        """Connect lazily.

        Raises:
            ConfigError: No URL, a server twice, or a bad URL.
        """
        addresses = [ShardAddress(url, access) for url in urls]
        names = tuple(address.name for address in addresses)
        placement = RendezvousSharding(names)
        shards = tuple(RegistryShard(address, limits, hooks) for address in addresses)
        self._view = ShardView(shards=shards, ids=names, homes=(b"",) * len(shards), placement=placement)

    async def view(self) -> ShardView:
        """Return the servers."""
        return self._view

    async def run(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands on several servers at once."""
        return await run_on_each(operation, view.shards, commands)

    @property
    def num_silent(self) -> int:
        """Servers whose last pipeline got no answer."""
        return sum(shard.is_silent for shard in self._view.shards)

    async def close(self) -> None:
        """Close every connection."""
        for shard in self._view.shards:
            await shard.close()


async def run_on_each(operation: str, shards: Sequence[RegistryShard], commands: Commands) -> Replies:
    """Run a pipeline per shard, all at once."""
    async with asyncio.TaskGroup() as group:
        tasks = {index: group.create_task(shards[index].run(operation, words)) for index, words in commands.items()}
    return {index: task.result() for index, task in tasks.items()}
