"""A Redis Cluster as a source of shards: one shard per master, keys placed by the cluster's own slots.

Which master serves which slot is asked of any node, and asked again when a master falls silent or says MOVED. The key
that must lie on a given master ends with a hash tag of a slot that it serves.

Source: Redis Cluster specification, https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/.
"""

import asyncio
import logging
import random
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import cast

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as NUM_SLOTS
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from kv_store.registry.backoff import Backoff
from kv_store.registry.connection import ShardAccess, ShardAddress, ShardLimits
from kv_store.registry.scripts import ALL, Command, Script
from kv_store.registry.shard import RegistryShard, Reply, ShardHooks
from kv_store.registry.shard_source import Commands, Replies, ShardView, ask_each, report_refused, without_refusals
from messages.errors import ConfigError
from messages.handoff import BlockKey

log = logging.getLogger(__name__)

_NOBODY = -1
_NOT_SERVED = (AskError, TryAgainError, ClusterDownError)
REFRESH_PERIOD_S = 1.0
"""A cluster in trouble is asked for its slots no more often than this."""
MOST_REFRESH_PERIOD_S = 16.0
"""Slots that nobody serves are asked for ever less often, but no less than this."""

Node = tuple[str, int]
Redirect = tuple[int, int, AskError]
"""Shard, position among its commands, and where to go instead: for good (MovedError), or this once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRange:
    """Neighbouring slots of one master."""

    first: int
    last: int
    master: Node
    replicas: tuple[Node, ...] = ()


class SlotPlacement:
    """Index of the shard of each slot; a slot that nobody serves has none, and its keys are left out."""

    def __init__(
        self, ranges: Iterable[SlotRange], masters: Sequence[Node], name_of: Callable[[BlockKey], bytes]
    ) -> None:
        self._name_of = name_of
        self._shard_of = array("h", [_NOBODY]) * NUM_SLOTS
        for part in ranges:
            size = part.last - part.first + 1
            self._shard_of[part.first : part.last + 1] = array("h", [masters.index(part.master)]) * size

    @property
    def is_whole(self) -> bool:
        """Whether every slot is served."""
        return _NOBODY not in self._shard_of

    def split(self, keys: Sequence[BlockKey]) -> dict[int, list[int]]:
        """Return, per shard that keeps any of `keys`, the positions of its keys, ascending."""
        positions: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            shard = self._shard_of[key_slot(self._name_of(key))]
            if shard != _NOBODY:
                positions.setdefault(shard, []).append(position)
        return positions


class ClusterShards:
    """A `ShardSource` over the masters of one cluster."""

    def __init__(
        self,
        urls: Sequence[str],
        access: ShardAccess,
        limits: ShardLimits,
        hooks: ShardHooks,
        name_of: Callable[[BlockKey], bytes],
        known_scripts: Sequence[Script] = ALL,
    ) -> None:
        """Connect lazily.

        Args:
            urls: Some nodes of the cluster; one that answers is enough.
            access: How to get in, the same for every node.
            limits: Bounds per node.
            hooks: Who hears of what shards do.
            name_of: The whole name under which a block is kept, which gives its slot.
            known_scripts: Those that commands may run.

        Raises:
            ConfigError: No URL, or one that a cluster cannot have.
        """
        if not urls:
            raise ConfigError("the registry needs at least one node of its cluster")
        seeds = [ShardAddress(url, access) for url in urls]
        if any(seed.is_socket or seed.db for seed in seeds):
            raise ConfigError("a Redis Cluster has neither socket files nor numbered databases")
        self._seeds: list[Node] = [(seed.host, seed.port) for seed in seeds]
        self._address = seeds[0]
        self._limits = limits
        self._hooks = hooks
        self._name_of = name_of
        self._scripts = known_scripts
        self._shards: dict[Node, RegistryShard] = {}
        self._known: list[Node] = []
        self._view: ShardView | None = None
        self._is_whole = False
        self._ids: dict[Node, str] = {}
        self._num_repairs = 0
        """How often slots that nobody served were served again."""
        self._asked_at_s = -REFRESH_PERIOD_S
        self._served: frozenset[tuple[int, int, Node]] = frozenset()
        """First and last slot and master of each range."""
        self._again = Backoff(first_s=REFRESH_PERIOD_S, most_s=MOST_REFRESH_PERIOD_S)
        """When slots that nobody serves are asked for, if nothing tells of a change before."""
        self._refresh: asyncio.Task[None] | None = None

    async def view(self) -> ShardView:
        """Return the masters; none while no node has answered yet."""
        if self._view is None:
            # All first callers wait for one answer, and one that leaves does not take it from the others.
            await asyncio.shield(self._refresh_soon())
        elif not self._is_whole and self._again.is_due(time.monotonic()):
            # Nothing is sent for slots that nobody serves, so no answer will tell of a change.
            self._refresh_soon()
        return _NO_SHARDS if self._view is None else self._view

    async def ask(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands on several masters at once; those that were sent to the wrong one go to the right one.

        A command that no master takes now has no answer.
        """
        replies = await ask_each(operation, view, commands)
        redirects: list[Redirect] = [
            (index, position, reply)
            for index, given in replies.items()
            for position, reply in enumerate(given)
            if isinstance(reply, AskError)
        ]
        if redirects:
            await self._follow(operation, commands, replies, redirects)
        if redirects or any(_tells_of_change(given) for given in replies.values()):
            self._refresh_soon()
        report_refused(operation, view, replies)
        return {
            index: [None if isinstance(reply, _NOT_SERVED) else reply for reply in given]
            for index, given in replies.items()
        }

    async def run(self, operation: str, view: ShardView, commands: Commands) -> Replies:
        """Run commands as `ask` does; None also for those that were refused."""
        return without_refusals(await self.ask(operation, view, commands))

    @property
    def num_silent(self) -> int:
        """Masters whose last pipeline got no answer; 1 while none is known."""
        return 1 if self._view is None else sum(shard.is_silent for shard in self._view.shards)

    async def close(self) -> None:
        """Close every connection."""
        if self._refresh is not None:
            self._refresh.cancel()
            await asyncio.gather(self._refresh, return_exceptions=True)
        for shard in self._shards.values():
            await shard.close()

    async def _follow(
        self, operation: str, commands: Commands, replies: Replies, redirects: Sequence[Redirect]
    ) -> None:
        """Send redirected commands where they belong; their replies take the place of the redirects."""
        by_node: dict[Node, list[Redirect]] = {}
        for redirect in redirects:
            error = redirect[2]
            by_node.setdefault((error.host or self._address.host, error.port), []).append(redirect)
        for node, there in by_node.items():
            words: list[Command] = []
            for index, position, error in there:
                # A slot that is on its way is served by its new master only to those who say so.
                words += [] if isinstance(error, MovedError) else [("ASKING",)]
                words.append(commands[index][position])
            answers = iter(await self._shard(node).ask(operation, words))
            for index, position, error in there:
                if not isinstance(error, MovedError):
                    next(answers)
                replies[index][position] = next(answers)

    def _refresh_soon(self) -> asyncio.Task[None]:
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._refreshed(), name="registry-slots")
        return self._refresh

    async def _refreshed(self) -> None:
        """Learn the slots from the first node that answers, unless that was tried a moment ago."""
        now_s = time.monotonic()
        if now_s - self._asked_at_s < REFRESH_PERIOD_S:
            return
        self._asked_at_s = now_s
        nodes = list(dict.fromkeys([*self._known, *self._seeds]))
        random.shuffle(nodes)
        for node in nodes:
            (reply,) = await self._shard(node).run("slots", [("CLUSTER", "SLOTS")])
            if reply is not None and (ranges := read_slots(reply, node[0])):
                await self._take(ranges)
                break
        if self._is_whole:
            self._again.succeeded()
        else:
            self._again.failed(now_s)

    async def _take(self, ranges: Sequence[SlotRange]) -> None:
        served = frozenset((part.first, part.last, part.master) for part in ranges)
        if served != self._served:
            # What has begun to change soon goes on.
            self._again.succeeded()
        self._served = served
        first_slots: dict[Node, int] = {}
        for part in sorted(ranges, key=lambda part: part.first):
            first_slots.setdefault(part.master, part.first)
        masters = tuple(first_slots)
        self._known = list(dict.fromkeys([*masters, *(node for part in ranges for node in part.replicas)]))
        placement = SlotPlacement(ranges, masters, self._name_of)
        if self._view is not None and placement.is_whole and not self._is_whole:
            # Some slots may have come back without their data, so to those who write these are new shards.
            self._num_repairs += 1
            self._ids = {}
        self._is_whole = placement.is_whole
        self._ids = part_ids(first_slots, self._ids, self._num_repairs)
        view = ShardView(
            shards=tuple(self._shard(node) for node in masters),
            ids=tuple(self._ids[node] for node in masters),
            homes=tuple(home_of_slot(slot) for slot in first_slots.values()),
            placement=placement,
        )
        if self._view is None or self._view.shards != view.shards:
            log.info("cluster.read num_masters=%d", len(masters))
        self._view = view
        for node in self._shards.keys() - set(self._known) - set(self._seeds):
            await self._shards.pop(node).close()

    def _shard(self, node: Node) -> RegistryShard:
        if node not in self._shards:
            self._shards[node] = RegistryShard(self._address.at(*node), self._limits, self._hooks, self._scripts)
        return self._shards[node]


def read_slots(reply: Reply, asked_host: str) -> list[SlotRange]:
    """Read what CLUSTER SLOTS answered.

    Args:
        reply: [first slot, last slot, master, replica, ...] per range; a node is [host, port, id, ...].
        asked_host: The host of nodes that do not know their own.
    """
    return [
        SlotRange(
            first=int(first),
            last=int(last),
            master=_node(master, asked_host),
            replicas=tuple(_node(node, asked_host) for node in replicas),
        )
        for first, last, master, *replicas in cast("list[list[object]]", reply)
        if isinstance(first, int) and isinstance(last, int)
    ]


def part_ids(first_slots: Mapping[Node, int], before: Mapping[Node, str], num_repairs: int) -> dict[Node, str]:
    """Name the part of the data that each master keeps.

    A master keeps its name while slots come and go, with their data. One that is new has the name of the part that
    began with its first slot, unless another master keeps that one.

    Args:
        first_slots: By master.
        before: The names so far.
        num_repairs: Tells names from those before the data may have been lost.
    """
    ids = {node: before[node] for node in first_slots if node in before}
    for node, slot in first_slots.items():
        if node not in ids:
            name = f"slot-{slot}/{num_repairs}"
            ids[node] = f"{name}@{node[0]}:{node[1]}" if name in ids.values() else name
    return ids


@lru_cache(maxsize=NUM_SLOTS)
def home_of_slot(slot: int) -> bytes:
    """Return a hash tag, with its braces, that lies in `slot`."""
    return next(b"{%d}" % number for number in count() if key_slot(b"%d" % number) == slot)


def _node(row: object, asked_host: str) -> Node:
    host, port, *_ = cast("Sequence[bytes | str | int | None]", row)
    name = host.decode() if isinstance(host, bytes) else str(host or "")
    return (name if name not in ("", "?") else asked_host, int(cast("int", port)))


def _tells_of_change(replies: Sequence[Reply | None]) -> bool:
    return any(reply is None or isinstance(reply, ClusterDownError) for reply in replies)


_NO_SHARDS = ShardView(shards=(), ids=(), homes=(), placement=SlotPlacement((), (), bytes))
