import socket
import time

import pytest

from kv_store import ledger_scripts
from kv_store.redis_ledger import RedisLedger
from kv_store.registry import scripts
from kv_store.registry.key_names import KeyNames
from kv_store.registry.shard import ShardFailure, ShardHooks, ShardLimits
from messages.errors import ConfigError, RegistryError, Unavailable
from messages.reservations import Candidate, Need

NEED = Need(prefill_tokens=1, kv_tokens=1)
CANDIDATE = Candidate(worker_id="a", incarnation="1", cost=0.0, cost_per_token=1.0, room_tokens=1)


@pytest.mark.parametrize(
    ("shards", "namespace", "is_cluster"),
    [
        ([], "n", False),
        (["http://redis-0"], "n", False),
        (["redis://a:1", "redis://user:pw@a:1/0"], "n", False),
        (["redis://a:1"], "", False),
        (["redis://a:1"], "n{b}", False),
        ([], "n", True),
        (["redis://a:1/2"], "n", True),
    ],
)
def test_a_bad_address_is_a_config_error(shards: list[str], namespace: str, *, is_cluster: bool) -> None:
    with pytest.raises(ConfigError):
        RedisLedger(shards, namespace, is_cluster=is_cluster)


async def test_a_server_that_is_not_there_is_a_registry_error_at_once() -> None:
    failures: list[ShardFailure] = []
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{reserved.getsockname()[1]}/0"
        async with RedisLedger(
            [url], limits=ShardLimits(timeout_s=5.0), hooks=ShardHooks(on_failure=failures.append)
        ) as ledger:
            started_s = time.monotonic()
            with pytest.raises(RegistryError):
                await ledger.reserve("decode", [CANDIDATE], NEED, nonce="r", ttl_s=1.0)
            elapsed_s = time.monotonic() - started_s

    assert elapsed_s < 2.5
    assert [(failure.operation, failure.reason) for failure in failures] == [("reserve", "connection")]


async def test_a_cluster_that_is_not_there_is_a_registry_error() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{reserved.getsockname()[1]}"
        async with RedisLedger([url], is_cluster=True) as ledger:
            with pytest.raises(RegistryError):
                await ledger.release("decode", "r")


async def test_what_cannot_be_asked_is_refused_before_anything_is_sent() -> None:
    async with RedisLedger(["redis://127.0.0.1:1/0"]) as ledger:
        with pytest.raises(Unavailable):
            await ledger.reserve("decode", [], NEED, nonce="r", ttl_s=1.0)
        with pytest.raises(ConfigError):
            await ledger.reserve("decode", [CANDIDATE], NEED, nonce="r", ttl_s=0.0)


def test_every_step_knows_how_the_data_lies_and_runs_on_a_full_server() -> None:
    texts = [script.text for script in ledger_scripts.ALL]

    assert len(set(texts)) == 4
    assert all(text.startswith("#!lua flags=allow-oom\n") for text in texts)
    assert all("local function sweep()" in text for text in texts)
    assert not {script.digest for script in ledger_scripts.ALL} & {script.digest for script in scripts.ALL}


def test_a_script_may_run_on_several_keys() -> None:
    command = ledger_scripts.RELEASE.on((b"k", b"l"), "r", 7)

    assert command == ("EVALSHA", ledger_scripts.RELEASE.digest, 2, b"k", b"l", "r", 7)


@pytest.mark.parametrize("pool", [b"", b"}", b"{", b"long", b"a}w"])
def test_the_keys_of_a_pool_share_a_tag_that_is_not_empty(pool: bytes) -> None:
    stem = KeyNames("n").ledger(pool)

    tag = stem[stem.index(b"{") + 1 : stem.index(b"}")]

    assert tag
    assert stem.endswith(pool + b"}")
