"""Where shards come from, and which of them keeps a key: fixed servers here, a Redis Cluster in `cluster.py`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from redis.exceptions import RedisError

from kv_store.registry.connection import ShardAccess, ShardAddress, ShardLimits
from kv_store.registry.scripts import ALL, Command, Script
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
    """Which part of the data each shard keeps. Stays when another server takes the part over with its data, and changes
    when the data may be lost without a trace."""
    homes: tuple[bytes, ...]
    """What the name of a key ends with that must lie on the shard; see `key_names.py`."""
    placement: Placement


class ShardSource(Protocol):
    """A set of shards and the way to talk to them."""

    async def view(self) -> ShardView:
        """Return the present shards; none when they are not known."""
        ...

    async def ask(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands on shards of `view` at once.

        Returns:
            None for every reply that a shard did not give, RedisError for a command that it refused.
        """
        ...

    async def run(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands as `ask` does; None also for those that were refused."""
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

    def __init__(
        self,
        urls: Sequence[str],
        access: ShardAccess,
        limits: ShardLimits,
        hooks: ShardHooks,
        known_scripts: Sequence[Script] = ALL,
    ) -> None:
        """Connect lazily; `known_scripts` are those that commands may run.

        Raises:
            ConfigError: No URL, a server twice, or a bad URL.
        """
        addresses = [ShardAddress(url, access) for url in urls]
        names = tuple(address.name for address in addresses)
        placement = RendezvousSharding(names)
        shards = tuple(RegistryShard(address, limits, hooks, known_scripts) for address in addresses)
        self._view = ShardView(shards=shards, ids=names, homes=(b"",) * len(shards), placement=placement)

    async def view(self) -> ShardView:
        """Return the servers."""
        return self._view

    async def ask(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands on several servers at once."""
        replies = await ask_each(operation, view, commands)
        report_refused(operation, view, replies)
        return replies

    async def run(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands as `ask` does; None also for those that were refused."""
        return without_refusals(await self.ask(operation, view, commands))

    @property
    def num_silent(self) -> int:
        """Servers whose last pipeline got no answer."""
        return sum(shard.is_silent for shard in self._view.shards)

    async def close(self) -> None:
        """Close every connection."""
        for shard in self._view.shards:
            await shard.close()


async def ask_each(operation: str, view: ShardView, commands: Commands) -> Replies:
    """Run a pipeline per shard, all at once; errors stay among the replies."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            index: group.create_task(view.shards[index].ask(operation, words)) for index, words in commands.items()
        }
    return {index: task.result() for index, task in tasks.items()}


def report_refused(operation: str, view: ShardView, replies: Replies) -> None:
    """Tell, per shard, of the commands that it refused."""
    for index, given in replies.items():
        num_refused = sum(isinstance(reply, RedisError) for reply in given)
        if num_refused:
            view.shards[index].report(operation, "refused", num_refused)


def without_refusals(replies: Replies) -> Replies:
    """Put None where a command was refused."""
    return {
        index: [None if isinstance(reply, RedisError) else reply for reply in given] for index, given in replies.items()
    }
