"""The ledger over Redis or Valkey: each pool on one shard, so that its gateways select and reserve one after the other.

A step is one script over the three keys of a pool, which share a hash tag, so plain servers and a Redis Cluster look
alike. Times run on the clock of the shard. How the data lies is said in `lua/ledger_book.lua`.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Self, cast

from redis.exceptions import RedisError

from kv_store import ledger_scripts
from kv_store.registry.cluster import ClusterShards
from kv_store.registry.connection import ShardAccess, ShardLimits
from kv_store.registry.key_names import KeyNames
from kv_store.registry.scripts import Script
from kv_store.registry.shard import ShardHooks
from kv_store.registry.shard_source import PlainServers, ShardSource
from messages.errors import RegistryError, Unavailable
from messages.handoff import BlockKey
from messages.reservations import MAX_TTL_S, OVERTAKEN_S, Candidate, Need, Reservation, check_ttl

__all__ = ["RedisLedger"]

_LIMITS = ShardLimits(timeout_s=0.25, cooldown_s=0.1)
_KEEP_MS = int(MAX_TTL_S * 1000)
_OVERTAKEN_MS = int(OVERTAKEN_S * 1000)
_MAX_SWEPT = 32
"""Ends that one step looks at, beyond what it was asked for; a reservation adds at most two."""


class RedisLedger:
    """A `Ledger` that every gateway of a cluster shares; each makes its own, for one event loop."""

    def __init__(
        self,
        shards: Sequence[str],
        namespace: str = "default",
        *,
        limits: ShardLimits | None = None,
        access: ShardAccess | None = None,
        is_cluster: bool = False,
        hooks: ShardHooks | None = None,
    ) -> None:
        """Connect lazily; nothing is sent yet.

        Args:
            shards: URLs, the same set in every gateway; the order does not matter. Of a cluster, some of its nodes.
            namespace: Ledgers of different namespaces do not see each other; it may be a registry's.
            limits: Timeout, cooldown and connections per shard; None: 0.25 s, since requests wait for it.
            access: User, password and TLS.
            is_cluster: Whether the URLs are nodes of one Redis Cluster.
            hooks: Who hears of what shards do.

        Raises:
            ConfigError: No shard, a shard twice, a bad URL or a bad namespace.
        """
        self._names = KeyNames(namespace)
        access, limits, hooks = access or ShardAccess(), limits or _LIMITS, hooks or ShardHooks()
        self._source: ShardSource = (
            ClusterShards(shards, access, limits, hooks, self._names.ledger, ledger_scripts.ALL)
            if is_cluster
            else PlainServers(shards, access, limits, hooks, ledger_scripts.ALL)
        )
        self._open: dict[str, int] = {}
        self.num_expired = 0
        self.num_released = 0
        self.num_dropped = 0

    @property
    def num_open(self) -> int:
        """Reservations that live in all pools used here, whoever made them, when they were last asked."""
        return sum(self._open.values())

    async def reserve(
        self, pool: str, candidates: Sequence[Candidate], need: Need, *, nonce: str, ttl_s: float
    ) -> Reservation:
        """Choose the cheapest candidate and reserve on it; see `Ledger.reserve`."""
        if not candidates:
            raise Unavailable("no worker to reserve on", pool=pool)
        ttl_ms = max(1, int(check_ttl(ttl_s) * 1000))
        words = json.dumps([_words_of(candidate) for candidate in candidates], separators=(",", ":"))
        row = await self._step(
            "reserve",
            ledger_scripts.RESERVE,
            pool,
            (nonce, ttl_ms, need.prefill_tokens, need.kv_tokens, secrets.token_hex(8), words),
        )
        if not row[0]:
            raise Unavailable("released before it was reserved", pool=pool, nonce=nonce)
        return _read(pool, nonce, row)

    async def release(self, pool: str, nonce: str) -> bool:
        """End a reservation; see `Ledger.release`."""
        (num_ended,) = await self._step("release", ledger_scripts.RELEASE, pool, (nonce, _OVERTAKEN_MS))
        self.num_released += _number(num_ended)
        return num_ended == 1

    async def forget(self, pool: str, worker_id: str, incarnation: str) -> int:
        """End all reservations of a dead worker's life; see `Ledger.forget`."""
        (num_ended,) = await self._step("forget", ledger_scripts.FORGET, pool, (worker_id, incarnation))
        return _number(num_ended)

    async def pending(self, pool: str) -> list[Reservation]:
        """Return the live reservations; see `Ledger.pending`."""
        (rows,) = await self._step("pending", ledger_scripts.PENDING, pool, ())
        return [_read(pool, _text(nonce), row) for nonce, *row in cast("list[list[object]]", rows)]

    async def close(self) -> None:
        """Close every connection."""
        await self._source.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _step(self, operation: str, script: Script, pool: str, args: Sequence[str | int]) -> list[object]:
        """Run one step on the pool's shard; return what it answered without the counts, which are taken over.

        Raises:
            RegistryError: The shard did not answer, refused, or nobody keeps the pool now.
        """
        view = await self._source.view()
        place = list(view.placement.split([BlockKey(pool.encode())]))
        if not place:
            raise RegistryError("no server keeps this pool's ledger now", pool=pool)
        stem = self._names.ledger(pool.encode())
        command = script.on((stem + b"w", stem + b"n", stem + b"e"), _KEEP_MS, _MAX_SWEPT, *args)
        (reply,) = (await self._source.ask(operation, view, {place[0]: [command]}))[place[0]]
        if reply is None or isinstance(reply, RedisError):
            raise RegistryError("the ledger does not answer", pool=pool, shard=view.ids[place[0]]) from reply
        *answer, num_open, num_expired, num_dropped = cast("list[object]", reply)
        self._open[pool] = _number(num_open)
        self.num_expired += _number(num_expired)
        self.num_dropped += _number(num_dropped)
        return answer


def _words_of(candidate: Candidate) -> list[object]:
    per_lacking = candidate.cost_per_lacking_token
    return [
        candidate.worker_id,
        candidate.incarnation,
        float(candidate.cost),
        float(candidate.cost_per_token),
        float(candidate.cost_per_request),
        float(candidate.cost_per_token if per_lacking is None else per_lacking),
        int(candidate.room_tokens),
        {seen.issuer: [seen.through, *seen.beyond] for seen in candidate.admitted},
    ]


def _read(pool: str, nonce: str, row: Sequence[object]) -> Reservation:
    worker_id, incarnation, issuer, sequence, prefill_tokens, kv_tokens = row
    return Reservation(
        nonce=nonce,
        pool=pool,
        worker_id=_text(worker_id),
        incarnation=_text(incarnation),
        issuer=_text(issuer),
        sequence=_number(sequence),
        prefill_tokens=_number(prefill_tokens),
        kv_tokens=_number(kv_tokens),
    )


def _text(word: object) -> str:
    return cast("bytes", word).decode()


def _number(word: object) -> int:
    return cast("int", word)
