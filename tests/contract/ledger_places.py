"""The ledgers that keep one promise, and what the tests of it put into them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from cluster.ledger import Ledger
from cluster.memory_ledger import MemoryLedger
from kv_store.redis_ledger import RedisLedger
from kv_store.registry.connection import ShardAccess
from messages.reservations import Admitted, Candidate, Need
from tests.contract.registry_places import PATIENT, namespaces
from tests.contract.registry_servers import PASSWORD, USER, Cluster, SecureServer

POOL = "decode"
TTL_S = 600.0
NEED = Need(prefill_tokens=100, kv_tokens=100)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, kw_only=True)
class LedgerPlace:
    """The ledgers of two gateways, and one of another namespace."""

    ledger: Ledger
    second_gateway: Ledger
    elsewhere: Ledger
    let_time_pass: Callable[[], Awaitable[None]]
    """20 ms."""

    @property
    def gateways(self) -> tuple[Ledger, Ledger]:
        return self.ledger, self.second_gateway


def make_redis_ledger(request: pytest.FixtureRequest, kind: str, namespace: str) -> RedisLedger:
    if kind == "cluster":
        nodes: Cluster = request.getfixturevalue("cluster")
        return RedisLedger(nodes.urls[:1], namespace, limits=PATIENT, is_cluster=True)
    if kind == "TLS and AUTH":
        server: SecureServer = request.getfixturevalue("secure")
        access = ShardAccess(
            username=USER,
            password=PASSWORD,
            ca_file=server.ca_file,
            certificate_file=server.certificate_file,
            key_file=server.key_file,
        )
        return RedisLedger([server.url()], namespace, limits=PATIENT, access=access)
    urls: list[str] = request.getfixturevalue("valkey_urls")
    return RedisLedger(urls[: 1 if kind == "one shard" else 4], namespace, limits=PATIENT)


def memory_place(clock: Clock) -> LedgerPlace:
    async def let_time_pass() -> None:
        clock.now_s += 0.02

    ledger = MemoryLedger(clock)
    return LedgerPlace(ledger=ledger, second_gateway=ledger, elsewhere=MemoryLedger(clock), let_time_pass=let_time_pass)


def redis_place(request: pytest.FixtureRequest, kind: str) -> LedgerPlace:
    namespace, other_namespace = next(namespaces), next(namespaces)
    return LedgerPlace(
        ledger=make_redis_ledger(request, kind, namespace),
        second_gateway=make_redis_ledger(request, kind, namespace),
        elsewhere=make_redis_ledger(request, kind, other_namespace),
        let_time_pass=lambda: asyncio.sleep(0.02),
    )


def candidate(
    worker_id: str,
    cost: float = 0.0,
    *,
    incarnation: str = "life-1",
    room_tokens: int = 1_000_000,
    admitted: tuple[Admitted, ...] = (),
    cost_per_token: float = 1.0,
    cost_per_request: float = 0.0,
    cost_per_lacking_token: float | None = None,
) -> Candidate:
    return Candidate(
        worker_id=worker_id,
        incarnation=incarnation,
        cost=cost,
        cost_per_token=cost_per_token,
        cost_per_request=cost_per_request,
        cost_per_lacking_token=cost_per_lacking_token,
        room_tokens=room_tokens,
        admitted=admitted,
    )


async def reserve_on(
    ledger: Ledger, nonce: str, candidates: Sequence[Candidate], need: Need = NEED, ttl_s: float = TTL_S
) -> str:
    """Reserve in the usual pool and say on which worker."""
    return (await ledger.reserve(POOL, candidates, need, nonce=nonce, ttl_s=ttl_s)).worker_id


async def pending_tokens(ledger: Ledger, pool: str = POOL) -> dict[str, int]:
    """Pending prefill tokens by worker."""
    tokens: dict[str, int] = {}
    for row in await ledger.pending(pool):
        tokens[row.worker_id] = tokens.get(row.worker_id, 0) + row.prefill_tokens
    return tokens
