"""Servers for the contract of registries, started once, and a fresh namespace on them for every test."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from kv_store.embedded import EmbeddedValkey
from tests.contract.registry_places import REDIS_KINDS, Place, make_redis, memory_place, namespaces
from tests.contract.registry_servers import Cluster, SecureServer, running_cluster, secure_server


@pytest.fixture(scope="session")
def valkey_urls() -> Iterator[list[str]]:
    with EmbeddedValkey(num_shards=4) as servers:
        yield servers.urls


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    with secure_server(tmp_path_factory.mktemp("secure")) as server:
        yield server


@pytest.fixture(params=["memory", *REDIS_KINDS])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    if request.param == "memory":
        yield memory_place()
        return
    namespace, other_namespace = next(namespaces), next(namespaces)
    async with AsyncExitStack() as stack:
        registry, second_view, elsewhere = [
            await stack.enter_async_context(make_redis(request, request.param, name))
            for name in (namespace, namespace, other_namespace)
        ]
        yield Place(
            registry=registry,
            second_view=second_view,
            elsewhere=elsewhere,
            let_time_pass=lambda: asyncio.sleep(0.02),
        )
