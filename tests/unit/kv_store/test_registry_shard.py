import asyncio
import socket
import time

import pytest
from redis.asyncio.connection import SSLConnection

from kv_store.registry.connection import ShardAccess, ShardAddress
from kv_store.registry.redis import RedisRegistry, shard_name
from kv_store.registry.shard import CircuitBreaker, RegistryShard, ShardFailure, ShardHooks, ShardLimits
from messages.errors import ConfigError


def shard_at(url: str, failures: list[ShardFailure], limits: ShardLimits | None = None) -> RegistryShard:
    return RegistryShard(ShardAddress(url), limits or ShardLimits(), ShardHooks(on_failure=failures.append))


def test_a_closed_breaker_lets_everybody_through() -> None:
    breaker = CircuitBreaker(cooldown_s=1.0)

    assert breaker.is_closed
    assert breaker.allows(0.0)
    assert breaker.allows(0.0)


def test_a_failure_shuts_everybody_out_until_the_cooldown_is_over() -> None:
    breaker = CircuitBreaker(cooldown_s=1.0)

    breaker.failed(10.0)

    assert not breaker.is_closed
    assert not breaker.allows(10.99)
    assert breaker.allows(11.0)


def test_after_the_cooldown_only_one_caller_probes() -> None:
    breaker = CircuitBreaker(cooldown_s=1.0)
    breaker.failed(10.0)

    assert breaker.allows(11.0)
    assert not breaker.allows(11.1)

    breaker.succeeded()
    assert breaker.allows(11.2)


def test_a_probe_that_never_reports_back_is_followed_by_another() -> None:
    breaker = CircuitBreaker(cooldown_s=1.0)
    breaker.failed(10.0)
    breaker.allows(11.0)

    assert breaker.allows(12.0)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://redis-0.kv:6379/0", "redis-0.kv:6379/0"),
        ("redis://:secret@redis-0.kv/2", "redis-0.kv:6379/2"),
        ("rediss://user:secret@redis-0.kv:7000", "redis-0.kv:7000/0"),
        ("unix:///run/redis.sock", "/run/redis.sock/0"),
    ],
)
def test_a_shards_name_says_where_it_is_and_no_password(url: str, name: str) -> None:
    assert shard_name(url) == name


@pytest.mark.parametrize(
    ("url", "name", "password"),
    [
        ("unix:///run/redis.sock?db=3&password=secret", "/run/redis.sock/3", "secret"),
        ("redis://a:1?db=2", "a:1/2", None),
        ("redis://a:1?username=u&password=secret", "a:1/0", "secret"),
    ],
)
def test_options_of_a_url_that_say_who_and_where_are_honoured(url: str, name: str, password: str | None) -> None:
    connection = ShardAddress(url).make_connection(ShardLimits())

    assert shard_name(url) == name
    assert connection.password == password


@pytest.mark.parametrize(
    "option",
    ["socket_timeout=1", "max_connections=4", "protocol=3", "ssl_cert_reqs=none", "tiemout=", "decode_responses=true"],
)
def test_an_option_that_would_not_be_honoured_is_a_config_error_that_names_it(option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ShardAddress(f"redis://:secret@a:1?db=2&{option}")

    name = option.partition("=")[0]
    assert str(caught.value) == f'a registry URL has an unknown option "{name}"; it takes db, password, username'


def test_a_part_of_a_password_that_looks_like_an_option_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="unknown option; it takes"):
        ShardAddress("redis://se?cret@a:1")


@pytest.mark.parametrize(
    ("shards", "namespace"),
    [
        ([], "n"),
        (["http://redis-0"], "n"),
        (["redis://a:1", "redis://user:pw@a:1/0"], "n"),
        (["redis://a:1"], ""),
        (["redis://a:1"], "n/b"),
    ],
)
def test_a_bad_registry_address_is_a_config_error(shards: list[str], namespace: str) -> None:
    with pytest.raises(ConfigError):
        RedisRegistry(shards, namespace)


def test_what_is_said_of_an_address_has_no_password() -> None:
    access = ShardAccess(username="user", password="secret")

    assert "secret" not in repr(access)
    with pytest.raises(ConfigError) as caught:
        ShardAddress("http://user:secret@redis-0")
    assert "secret" not in str(caught.value)


def test_another_node_of_a_cluster_lets_us_in_the_same_way() -> None:
    seed = ShardAddress("rediss://user:secret@redis-0.kv:7000", ShardAccess(ca_file="ca.pem"))

    node = seed.at("redis-9.kv", 7001)

    made = node.make_connection(ShardLimits())
    assert node.name == "redis-9.kv:7001/0"
    assert isinstance(made, SSLConnection)
    assert (made.username, made.password, made.ca_certs) == ("user", "secret", "ca.pem")
    assert (made.host, made.port) == ("redis-9.kv", 7001)


def test_what_the_url_says_goes_before_the_rest() -> None:
    access = ShardAccess(username="a", password="b")

    made = ShardAddress("redis://c:d@redis-0", access).make_connection(ShardLimits())

    assert (made.username, made.password) == ("c", "d")


async def test_a_port_without_a_server_answers_none_and_is_reported() -> None:
    failures: list[ShardFailure] = []
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{reserved.getsockname()[1]}/0"
        shard = shard_at(url, failures, ShardLimits(timeout_s=5.0))

        replies = await shard.run("lookup", [("HGETALL", b"k"), ("HGETALL", b"l")])
        again = await shard.run("lookup", [("HGETALL", b"k")])

    assert replies == [None, None]
    assert again == [None]
    assert [(failure.reason, failure.num_commands) for failure in failures] == [("connection", 2), ("skipped", 1)]


async def test_a_server_that_says_nothing_costs_one_timeout_and_then_nothing() -> None:
    failures: list[ShardFailure] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        shard = shard_at(url, failures, ShardLimits(timeout_s=0.05, cooldown_s=60.0))

        await shard.run("lookup", [("HGETALL", b"k")])
        started_s = time.monotonic()
        for _ in range(100):
            await shard.run("lookup", [("HGETALL", b"k")])
        elapsed_s = time.monotonic() - started_s
        await shard.close()

    assert failures[0].reason == "timeout"
    assert {failure.reason for failure in failures[1:]} == {"skipped"}
    assert elapsed_s < 0.05 * 100 / 2


async def test_no_commands_are_no_round_trip() -> None:
    shard = shard_at("redis://127.0.0.1:1/0", [])

    assert await shard.run("publish", []) == []


async def test_a_port_that_does_not_speak_redis_is_a_silent_shard() -> None:
    """Rule 5."""
    failures: list[ShardFailure] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        shard = shard_at(f"redis://127.0.0.1:{port}", failures)

        replies = await shard.run("lookup", [("HGETALL", b"k")])

    assert replies == [None]
    assert shard.is_silent
    assert [failure.reason for failure in failures] == ["connection"]
