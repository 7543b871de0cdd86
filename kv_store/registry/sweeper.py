"""Drops the claims of lives that have ended, a bounded part at a time, so that a registry holds what is true.

Readers ignore such claims from the moment a life ends; this only gives the memory back. One of all who tend a shard
leads there, under a short lease. It walks the shard's keys with a cursor: at once when a life has ended, and now and
then anyway.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import cast

from kv_store.registry import scripts
from kv_store.registry.key_names import Claim, KeyNames, pairs
from kv_store.registry.scripts import Command
from kv_store.registry.shard import Reply
from kv_store.registry.shard_source import ShardSource, ShardView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLimits:
    """Bounds on one tick on one shard."""

    scan_size: int = 256
    """Keys asked for at a time."""
    max_keys: int = 1024
    max_s: float = 0.1
    """A tick goes on to no further keys after so long."""
    period_s: float = 1800.0
    """A walk begins at the latest so long after the one before began."""
    lead_s: float = 15.0
    """Lease of the lead; ticks come more often."""


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Where the clean-up of one shard is."""

    cursor: int = 0
    is_running: bool = False
    is_wanted: bool = True
    started_s: float = 0.0
    lives: frozenset[tuple[str, str]] = frozenset()
    """Seen last; one that is missing later has ended."""
    ask_again_s: float = 0.0
    """Somebody else leads; not worth asking before."""


class Sweeper:
    """One participant; its ticks are bounded, and do nothing on shards where another one leads."""

    def __init__(
        self,
        source: ShardSource,
        names: KeyNames,
        read_lives: Callable[[], Awaitable[dict[str, str] | None]],
        limits: SweepLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take part from the first tick on.

        Args:
            source: The shards.
            names: Their keys.
            read_lives: Gives the life that counts by worker id; None when no shard answers.
            limits: Bounds per tick.
            clock: Seconds.
        """
        self._source = source
        self._names = names
        self._read_lives = read_lives
        self._limits = limits or SweepLimits()
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._walks: dict[str, _Walk] = {}

    async def tick(self) -> int:
        """Do one bounded part on every shard where this participant leads.

        Returns:
            Claims dropped.
        """
        view = await self._source.view()
        self._walks = {shard: self._walks.get(shard, _Walk()) for shard in view.ids}
        num_dropped = 0
        for index, shard in enumerate(view.ids):
            walk = self._walks[shard]
            if await self._leads(view, index, walk):
                num_dropped += await self._walk_on(view, index, walk)
        return num_dropped

    async def _leads(self, view: ShardView, index: int, walk: _Walk) -> bool:
        if self._clock() < walk.ask_again_s:
            return False
        lead = scripts.LEAD(self._names.leader(view.homes[index]), self._name, int(self._limits.lead_s * 1000))
        ((reply,),) = (await self._source.run("lead", view, {index: [lead]})).values()
        if reply in (None, 0):
            walk.ask_again_s = self._clock() + self._limits.lead_s / 3
            return False
        if reply == 2:
            # What the leader before me has done is not known.
            walk.is_wanted, walk.is_running = True, False
            await self._warn_of_eviction(view, index)
        return True

    async def _walk_on(self, view: ShardView, index: int, walk: _Walk) -> int:
        lives = await self._read_lives()
        if lives is None:
            return 0
        self._note(walk, lives)
        if not walk.is_running and not walk.is_wanted:
            return 0
        if not walk.is_running:
            walk.cursor, walk.is_running, walk.is_wanted, walk.started_s = 0, True, False, self._clock()
        deadline_s = self._clock() + self._limits.max_s
        num_keys = num_dropped = 0
        while walk.is_running and num_keys < self._limits.max_keys and self._clock() < deadline_s:
            found = await self._scan(view, index, walk)
            num_keys += max(len(found), self._limits.scan_size)
            num_dropped += await self._drop_dead(view, index, found)
        if num_dropped:
            log.debug("claims.dropped shard=%s num_claims=%d", view.ids[index], num_dropped)
        return num_dropped

    def _note(self, walk: _Walk, lives: dict[str, str]) -> None:
        present = frozenset(lives.items())
        if walk.lives - present or self._clock() - walk.started_s > self._limits.period_s:
            walk.is_wanted = True
        walk.lives = present

    async def _scan(self, view: ShardView, index: int, walk: _Walk) -> list[bytes]:
        scan: Command = ("SCAN", walk.cursor, "MATCH", self._names.block_pattern, "COUNT", self._limits.scan_size)
        ((reply,),) = (await self._source.run("sweep", view, {index: [scan]})).values()
        if reply is None:
            # The next tick begins again: a cursor may not outlive the server.
            walk.is_running, walk.is_wanted = False, True
            return []
        cursor, found = cast("tuple[bytes, list[bytes]]", reply)
        walk.cursor = int(cursor)
        walk.is_running = walk.cursor != 0
        return found

    async def _drop_dead(self, view: ShardView, index: int, found: list[bytes]) -> int:
        if not found:
            return 0
        commands: list[Command] = [("TIME",), *(("HGETALL", name) for name in found)]
        ((time_reply, *rows),) = (await self._source.run("sweep", view, {index: commands})).values()
        # Read after the claims: who claims has registered before, so nobody who is new looks dead.
        lives = await self._read_lives()
        if time_reply is None or lives is None:
            return 0
        seconds, microseconds = cast("tuple[bytes, bytes]", time_reply)
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        drops = [
            scripts.SWEEP(name, worker_id, value)
            for name, row in zip(found, rows, strict=True)
            for worker_id, value in _dead_claims(row, lives, now_ms)
        ]
        replies = await self._source.run("sweep", view, {index: drops}) if drops else {}
        return sum(reply == 1 for given in replies.values() for reply in given)

    async def _warn_of_eviction(self, view: ShardView, index: int) -> None:
        memory = await read_memory(self._source, view, index)
        if memory is not None and memory.may_evict:
            log.warning(
                "shard.may_evict shard=%s policy=%s: it may drop claims and leases when it is full; "
                "set maxmemory-policy to noeviction",
                view.shards[index].name,
                memory.policy,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """What a server says about its memory."""

    used_bytes: int
    max_bytes: int
    """0: no limit."""
    policy: str

    @property
    def may_evict(self) -> bool:
        """Whether the server may drop keys of its own accord."""
        return self.max_bytes > 0 and self.policy != "noeviction"


async def read_memory(source: ShardSource, view: ShardView, index: int) -> ServerMemory | None:
    """Ask a shard for its memory; None when it does not answer or may not say."""
    ((reply,),) = (await source.run("memory", view, {index: [("INFO", "memory")]})).values()
    lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    if not {"used_memory", "maxmemory", "maxmemory_policy"} <= told.keys():
        return None
    return ServerMemory(
        used_bytes=int(told["used_memory"]), max_bytes=int(told["maxmemory"]), policy=told["maxmemory_policy"]
    )


def _dead_claims(row: Reply | None, lives: dict[str, str], now_ms: int) -> Iterator[tuple[bytes, bytes]]:
    for worker_id, value in pairs(row):
        claim = Claim.read(value)
        if claim is None or claim.expires_ms <= now_ms or lives.get(worker_id.decode()) != claim.life:
            yield worker_id, value
