"""Embedded servers come up under our bounds and never outlive us."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from kv_store.embedded import EmbeddedValkey
from messages.errors import ConfigError, RegistryError

pytestmark = pytest.mark.redis


def is_gone(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until_gone(process_ids: list[int]) -> bool:
    give_up_s = time.monotonic() + 10
    while time.monotonic() < give_up_s:
        if all(is_gone(process_id) for process_id in process_ids):
            return True
        time.sleep(0.02)
    return False


def test_servers_keep_nothing_evict_nothing_and_listen_on_loopback_only() -> None:
    with EmbeddedValkey(num_shards=2, max_memory_bytes=32 << 20) as servers:
        for url in servers.urls:
            with redis.Redis.from_url(url) as client:
                settings = client.config_get("*")
                assert settings["maxmemory-policy"] == "noeviction"
                assert settings["maxmemory"] == str(32 << 20)
                assert settings["save"] == ""
                assert settings["appendonly"] == "no"
                assert settings["bind"] == "127.0.0.1"
        assert len(set(servers.urls)) == 2


def test_leaving_ends_the_servers_and_removes_their_folder(tmp_path: Path) -> None:
    with EmbeddedValkey(num_shards=2, directory=tmp_path / "made") as servers:
        process_ids = servers.process_ids
        assert len(list((tmp_path / "made").glob("*/shard-*/server.log"))) == 2

    assert all(is_gone(process_id) for process_id in process_ids)
    assert list((tmp_path / "made").iterdir()) == []
    assert servers.urls == []


def test_leaving_ends_a_frozen_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_store.embedded._STOP_TIMEOUT_S", 0.1)
    with EmbeddedValkey(num_shards=1) as servers:
        process_ids = servers.process_ids
        os.kill(process_ids[0], signal.SIGSTOP)

    assert all(is_gone(process_id) for process_id in process_ids)


def test_a_killed_shard_comes_back_empty_under_its_url() -> None:
    with EmbeddedValkey(num_shards=2) as servers:
        urls = servers.urls
        with redis.Redis.from_url(urls[1]) as client:
            client.set("k", "v")
            servers.kill_shard(1)
            with pytest.raises(redis.ConnectionError):
                client.ping()

            servers.restart_shard(1)

            assert client.get("k") is None
        assert servers.urls == urls


def test_a_port_that_somebody_else_took_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, EmbeddedValkey(num_shards=1) as other:
        taken = [silent.getsockname()[1], int(other.urls[0].rsplit(":", 1)[1].split("/")[0])]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        ports = iter([*taken, free])
        monkeypatch.setattr("kv_store.embedded._free_port", lambda: next(ports))

        with EmbeddedValkey(num_shards=1) as servers:
            assert servers.urls == [f"redis://127.0.0.1:{free}/0"]


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    servers = EmbeddedValkey(num_shards=1, directory=tmp_path, max_memory_bytes=-1)

    with pytest.raises(RegistryError, match="maxmemory"):
        servers.start()

    assert list(tmp_path.iterdir()) == []


def test_no_shards_are_refused() -> None:
    with pytest.raises(ConfigError):
        EmbeddedValkey(num_shards=0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_servers_outlive_the_thread_that_entered() -> None:
    servers = EmbeddedValkey(num_shards=1)
    thread = threading.Thread(target=servers.start)
    thread.start()
    thread.join()
    try:
        with redis.Redis.from_url(servers.urls[0]) as client:
            give_up_s = time.monotonic() + 0.3
            while time.monotonic() < give_up_s:
                assert client.ping()
                time.sleep(0.05)
    finally:
        servers.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_servers_end_when_their_process_is_killed(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from kv_store.embedded import EmbeddedValkey
with EmbeddedValkey(num_shards=2, directory=Path({str(tmp_path)!r})) as servers:
    print(*servers.process_ids, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()

    assert len(process_ids) == 2
    assert wait_until_gone(process_ids)
