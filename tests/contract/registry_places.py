"""The registries that keep one promise, and what the tests of it put into them."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256

import pytest

from kv_store.registry.connection import ShardAccess
from kv_store.registry.memory import MemoryRegistry
from kv_store.registry.protocol import Registry, WorkerRecord
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.shard import ShardLimits
from messages.handoff import BlockKey
from tests.contract.registry_servers import PASSWORD, USER, Cluster, SecureServer

PATIENT = ShardLimits(timeout_s=10.0)
namespaces = (f"contract-{number}" for number in itertools.count())


@dataclass(frozen=True, kw_only=True)
class Place:
    """A registry under test, a second view of the same data, and a registry of another namespace."""

    registry: Registry
    second_view: Registry
    elsewhere: Registry
    let_time_pass: Callable[[], Awaitable[None]]


def make_redis(request: pytest.FixtureRequest, kind: str, namespace: str) -> RedisRegistry:
    if kind == "cluster":
        nodes: Cluster = request.getfixturevalue("cluster")
        return RedisRegistry(nodes.urls[:1], namespace, limits=PATIENT, is_cluster=True)
    if kind == "TLS and AUTH":
        server: SecureServer = request.getfixturevalue("secure")
        access = ShardAccess(
            username=USER,
            password=PASSWORD,
            ca_file=server.ca_file,
            certificate_file=server.certificate_file,
            key_file=server.key_file,
        )
        return RedisRegistry([server.url()], namespace, limits=PATIENT, access=access)
    urls: list[str] = request.getfixturevalue("valkey_urls")
    return RedisRegistry(urls[: 1 if kind == "one shard" else 4], namespace, limits=PATIENT)


REDIS_KINDS = [
    pytest.param(kind, marks=pytest.mark.redis) for kind in ("one shard", "four shards", "cluster", "TLS and AUTH")
]


def memory_place() -> Place:
    now_s = [0.0]

    async def let_time_pass() -> None:
        now_s[0] += 0.02

    registry = MemoryRegistry(clock=lambda: now_s[0])
    return Place(
        registry=registry,
        second_view=registry,
        elsewhere=MemoryRegistry(clock=lambda: now_s[0]),
        let_time_pass=let_time_pass,
    )


def worker(worker_id: str, incarnation: str = "life-1") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        address="127.0.0.1:1",
        pool="short",
        role="unified",
        model="tiny",
        fingerprint="f" * 32,
        block_size=32,
        key_model="tiny@1",
        key_codec="raw-float32",
        context_length=8192,
    )


def block_keys(num_blocks: int, seed: str = "prompt") -> list[BlockKey]:
    return [BlockKey(sha256(f"{seed}/{index}".encode()).digest()) for index in range(num_blocks)]
