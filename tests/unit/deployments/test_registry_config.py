"""The config's part about the registry, and the registry that is made from it."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deployments.config import AppConfig, parse_config
from deployments.config_kv import RegistryConfig
from deployments.registry_client import hooks_into, make_registry
from deployments.worker.runtime import RegistryCounts
from kv_store.registry.cluster import ClusterShards
from kv_store.registry.protocol import PrefixHits
from kv_store.registry.shard import ShardFailure, ShardLimits
from kv_store.registry.shard_source import PlainServers
from messages.errors import ConfigError
from telemetry.metrics import RegistryMetrics

MINIMAL = {"version": 1, "models": [{"source": "demo"}]}


def parse(**registry: object) -> AppConfig:
    return parse_config({**MINIMAL, "registry": registry})


@pytest.mark.parametrize(
    ("registry", "said"),
    [
        ({"cluster": True}, "cluster needs urls"),
        ({"urls": ["redis://a"], "password_file": "x", "password_env": "y"}, "give one"),
        ({"urls": ["rediss://a"], "key_file": "x"}, "go together"),
        ({"entry_ttl_s": 5, "lease_s": 2}, "entry_ttl_s must be at least four times lease_s"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(registry: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(**registry)


def test_a_password_in_a_bad_url_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(urls=["http://user:s3cret@redis-0:6379"])

    assert "s3cret" not in str(caught.value)
    assert '"http://***@redis-0:6379" is not a Redis URL' in str(caught.value)


async def test_urls_are_servers_or_nodes_of_one_cluster() -> None:
    urls = ["redis://a", "redis://b"]

    assert isinstance(make_registry(RegistryConfig(urls=urls)).source, PlainServers)
    assert isinstance(make_registry(RegistryConfig(urls=urls, cluster=True)).source, ClusterShards)


async def test_shards_of_plain_servers_are_named_without_secrets() -> None:
    registry = make_registry(RegistryConfig(urls=["redis://user:s3cret@a:7000/1"]))

    assert await registry.shards() == ("a:7000/1",)


def test_a_password_file_may_end_with_a_line_break(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("word \n")
    config = RegistryConfig(urls=["redis://a"], password_file=str(tmp_path / "password"))

    registry = make_registry(config)

    assert isinstance(registry.source, PlainServers)
    (shard,) = registry.source._view.shards
    assert shard.address.make_connection(ShardLimits()).password.split("w") == ["", "ord "]


def test_what_shards_do_is_counted() -> None:
    metrics = RegistryMetrics()
    hooks = hooks_into(metrics)

    hooks.on_failure(ShardFailure(shard="a:1/0", operation="lookup", reason="timeout", num_commands=32))
    hooks.on_answer("a:1/0", "lookup", 0.003)

    (errors,) = metrics.errors.collect()
    (seconds,) = metrics.seconds.collect()
    failed = {"shard": "a:1/0", "operation": "lookup", "reason": "timeout"}
    assert [s.value for s in errors.samples if s.name.endswith("_total") and s.labels == failed] == [32.0]
    assert [s.value for s in seconds.samples if s.name.endswith("_sum")] == [0.003]


def test_what_lookups_found_and_what_was_out_of_date_is_counted() -> None:
    """Metrics lookups, hit_blocks and stale_entries_dropped."""
    metrics, page = RegistryMetrics(), CollectorRegistry()
    metrics.register(page)
    hooks = hooks_into(metrics)

    hooks.on_lookup(PrefixHits(by_worker={"a": 5, "b": 3}))
    hooks.on_lookup(PrefixHits(by_worker={"a": 2}, unknown=True))
    hooks.on_lookup(PrefixHits())
    hooks.on_lookup(PrefixHits(unknown=True))
    hooks.on_stale("lookup", 4)
    hooks.on_stale("sweep", 9)

    def results(name: str, label: str, *values: str) -> list[float | None]:
        return [page.get_sample_value(name, {label: value}) for value in values]

    assert results("kvferry_registry_lookups_total", "result", "hit", "miss", "unknown") == [2.0, 1.0, 1.0]
    assert page.get_sample_value("kvferry_registry_hit_blocks_total") == 7.0
    assert results("kvferry_gateway_registry_stale_entries_dropped_total", "by", "lookup", "sweep") == [4.0, 9.0]


def test_a_worker_counts_what_it_removed_and_not_what_it_only_met() -> None:
    counts = RegistryCounts()

    counts.add_stale("sweep", 3)
    counts.add_stale("lookup", 5)
    counts.add_failure(ShardFailure(shard="a:1/0", operation="publish", reason="timeout", num_commands=32))

    assert (counts.stale, counts.failures) == (3, 32)
