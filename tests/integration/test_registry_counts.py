"""What a gateway and a worker count of a real registry, down to the page."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deployments.config_kv import RegistryConfig
from deployments.registry_client import hooks_into, make_registry
from deployments.worker.runtime import RegistryCounts
from kv_store.embedded import EmbeddedValkey
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.shard import ShardHooks
from telemetry.metrics import RegistryMetrics
from tests.contract.registry_places import block_keys, worker

pytestmark = pytest.mark.redis

KEYS = block_keys(100)
LEASE_S = 60.0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(2, tmp_path) as servers:
        yield servers


class Page:
    """A gateway's registry and its page."""

    def __init__(self, servers: EmbeddedValkey) -> None:
        metrics, self._page = RegistryMetrics(), CollectorRegistry()
        metrics.register(self._page)
        self.registry = make_registry(config_of(servers), hooks_into(metrics))

    def value(self, name: str, **labels: str) -> float:
        return self._page.get_sample_value(f"kvferry_{name}_total", labels) or 0.0


def config_of(servers: EmbeddedValkey) -> RegistryConfig:
    return RegistryConfig(urls=servers.urls, timeout_s=2.0)


async def held(registry: RedisRegistry, num_blocks: int, incarnation: str = "life-1") -> None:
    await registry.register(worker("a", incarnation), lease_s=LEASE_S)
    await registry.publish("a", incarnation, KEYS[:num_blocks])


async def test_lookups_and_the_blocks_they_found_are_counted(servers: EmbeddedValkey) -> None:
    page = Page(servers)
    async with page.registry as registry:
        await held(registry, 40)
        await registry.lookup(KEYS)
        await registry.lookup(KEYS[:10])
        await registry.lookup(KEYS[50:])
        await asyncio.to_thread(servers.kill_shard, 0)
        await asyncio.to_thread(servers.kill_shard, 1)
        await registry.lookup(KEYS)

    results = [page.value("registry_lookups", result=result) for result in ("hit", "miss", "unknown")]
    assert results == [2, 1, 1]
    assert page.value("registry_hit_blocks") == 50


async def test_claims_of_an_ended_life_are_counted_when_they_are_met_and_when_they_are_removed(
    servers: EmbeddedValkey,
) -> None:
    """Rules 6 and 10: fenced at once, purged lazily."""
    page, counts = Page(servers), RegistryCounts()
    hooks = ShardHooks(on_failure=counts.add_failure, on_stale=counts.add_stale)
    async with page.registry as registry, make_registry(config_of(servers), hooks) as of_worker:
        await held(registry, 40)
        await of_worker.register(worker("a", "life-2"), lease_s=LEASE_S)

        hits = await registry.lookup(KEYS[:1])
        for _ in range(3):
            await of_worker.tend()

        assert hits.by_worker == {}
        assert page.value("gateway_registry_stale_entries_dropped", by="lookup") == 1
        assert page.value("gateway_registry_stale_entries_dropped", by="sweep") == 0
        assert (counts.stale, counts.failures) == (40, 0)
