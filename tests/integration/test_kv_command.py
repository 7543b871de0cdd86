"""`kvferry kv` on shards with workers in them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import yaml
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli.commands import app
from deployments.config import load_config
from deployments.stack_file import RunningStack, find_stack, write_stack_file
from kv_store.block_key import KeyExtras, block_keys, root_key, tenant_salt
from kv_store.embedded import EmbeddedValkey
from kv_store.registry.redis import RedisRegistry
from messages.handoff import BlockKey
from tests.contract.registry_places import worker

pytestmark = pytest.mark.redis

PROMPT = list(range(100))
Run = Callable[..., str]


@pytest.fixture(scope="module")
def servers() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(num_shards=2) as servers:
        yield servers


@pytest.fixture
def config(servers: EmbeddedValkey, tmp_path: Path) -> Path:
    for url in servers.urls:
        with redis.Redis.from_url(url) as client:
            client.flushall()
    path = tmp_path / "app.yaml"
    path.write_text(
        yaml.safe_dump({"version": 1, "models": [{"source": "demo"}], "registry": {"urls": list(servers.urls)}})
    )
    return path


@pytest.fixture
def run(config: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    # The command's console is bound to the real stdout; a fresh one follows the runner's.
    monkeypatch.setattr("deployments.cli.kv_views.output", Console(width=200))

    def run(*words: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(app, ["kv", *words, "--config", str(config)])
        assert result.exit_code == exit_code, result.output
        return result.output

    return run


def keys_of(salt: bytes = b"") -> list[BlockKey]:
    record = worker("a")
    extras = KeyExtras(model=record.key_model, block_size=record.block_size, codec=record.key_codec, salt=salt)
    return block_keys(root_key(extras), PROMPT, record.block_size)


def fill(servers: EmbeddedValkey) -> None:
    async def fill_all() -> None:
        async with RedisRegistry(servers.urls, "kvferry") as registry:
            for name in ("a", "b"):
                await registry.register(worker(name), lease_s=60)
            await registry.publish("a", "life-1", keys_of())
            await registry.publish("b", "life-1", keys_of()[:2], tier="host")
            await registry.publish("b", "life-1", keys_of(tenant_salt("acme")))

    asyncio.run(fill_all())


def test_workers_are_listed_with_what_their_leases_have_left(run: Run, servers: EmbeddedValkey) -> None:
    fill(servers)

    table, data = run("workers"), json.loads(run("workers", "--json"))

    assert [row["worker_id"] for row in data["workers"]] == ["a", "b"]
    assert all(50 < row["lease_left_s"] <= 60 for row in data["workers"])
    assert (data["workers"][0]["incarnation"], data["workers"][0]["generation"]) == ("life-1", 0)
    assert "life-1" in table
    assert "short" in table


def test_without_workers_the_answer_says_so(run: Run) -> None:
    assert "no worker is registered" in run("workers")
    assert json.loads(run("workers", "--json")) == {"workers": []}


def test_stats_count_by_worker_tier_and_shard(run: Run, servers: EmbeddedValkey) -> None:
    fill(servers)

    table, shards = run("stats"), json.loads(run("stats", "--json"))["shards"]

    claims = [(claim["worker_id"], claim["tier"], claim["blocks"]) for shard in shards for claim in shard["claims"]]
    assert sum(count for name, _, count in claims if name == "a") == 3
    assert sum(count for _, tier, count in claims if tier == "host") == 2
    assert sum(shard["blocks"] for shard in shards) == 6
    assert all(shard["policy"] == "noeviction" and shard["used_bytes"] > 0 and shard["is_whole"] for shard in shards)
    assert "noeviction" in table


def test_a_walk_ends_at_its_bound_and_says_that_it_is_not_whole(run: Run, servers: EmbeddedValkey) -> None:
    async def publish_many() -> None:
        async with RedisRegistry(servers.urls, "kvferry") as registry:
            await registry.register(worker("a"), lease_s=60)
            await registry.publish("a", "life-1", block_keys(root_key(_extras()), range(32 * 4000), 32))

    asyncio.run(publish_many())

    shards = json.loads(run("stats", "--json", "--max-blocks", "600"))["shards"]

    assert all(600 <= shard["blocks"] < 1900 and not shard["is_whole"] for shard in shards)


def _extras() -> KeyExtras:
    record = worker("a")
    return KeyExtras(model=record.key_model, block_size=record.block_size, codec=record.key_codec)


def test_a_prefix_is_shown_with_its_holders_best_first(run: Run, servers: EmbeddedValkey) -> None:
    fill(servers)
    tokens = ",".join(map(str, PROMPT))

    data = json.loads(run("prefix", "--tokens", tokens, "--json"))
    of_tenant = json.loads(run("prefix", "--tokens", tokens, "--tenant", "acme", "--json"))

    assert (data["tokens"], data["blocks"], data["unknown"]) == (100, 3, False)
    assert [(holder["worker_id"], holder["blocks"], holder["tokens"]) for holder in data["holders"]] == [
        ("a", 3, 96),
        ("b", 2, 64),
    ]
    assert [(holder["worker_id"], holder["blocks"]) for holder in of_tenant["holders"]] == [("b", 3)]
    assert "nobody holds a block of it" in run("prefix", "--tokens", "7," * 40 + "7")


@pytest.mark.parametrize(
    "words",
    [
        ("prefix",),
        ("prefix", "text", "--tokens", "1"),
        ("prefix", "--tokens", "1,x"),
        ("prefix", "--tokens", "1", "--chat"),
    ],
)
def test_a_prompt_that_is_none_is_a_usage_error(run: Run, words: tuple[str, ...]) -> None:
    run(*words, exit_code=2)


def test_a_port_beside_a_config_that_names_its_registry_is_a_usage_error(run: Run) -> None:
    assert "registry.urls" in run("workers", "--http-port", "8000", exit_code=2)


def test_workers_that_do_not_answer_a_clear_are_named(run: Run, servers: EmbeddedValkey) -> None:
    fill(servers)  # They listen on port 1, where nobody is.

    data = json.loads(run("clear", "--worker", "a", "--json", exit_code=1))

    assert [row["worker_id"] for row in data["workers"]] == ["a"]
    assert "does not answer" in data["workers"][0]["error"]


def test_a_running_stack_is_found_without_a_config(
    servers: EmbeddedValkey, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(servers)
    folder = tmp_path / "kvferry-x"
    folder.mkdir()
    write_stack_file(folder, load_config(config))

    def find_here(http_port: int | None = None) -> RunningStack:
        return find_stack(http_port, [tmp_path])

    monkeypatch.setattr("deployments.cli.kv_questions.find_stack", find_here)
    monkeypatch.setattr("deployments.cli.kv_views.output", Console(width=200))

    result = CliRunner().invoke(app, ["kv", "workers", "--json"])

    assert result.exit_code == 0, result.output
    assert [row["worker_id"] for row in json.loads(result.output)["workers"]] == ["a", "b"]
