"""Redis behind TLS and a password: who is let in, and what nobody ever reads in a log."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.config_kv import RegistryConfig
from deployments.registry_client import make_registry
from kv_store.registry.shard import ShardFailure, ShardHooks
from messages.errors import ConfigError, RegistryError
from tests.contract.registry_places import block_keys, worker
from tests.contract.registry_servers import PASSWORD, USER, SecureServer, secure_server

pytestmark = pytest.mark.redis

WRONG = "not-" + PASSWORD


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    with secure_server(tmp_path_factory.mktemp("secure")) as server:
        yield server


def config_for(server: SecureServer, written: Path, **changes: object) -> RegistryConfig:
    written.write_text(f"{PASSWORD}\n")
    given: dict[str, object] = {
        "urls": [server.url()],
        "username": USER,
        "password_file": str(written),
        "timeout_s": 10.0,
        "ca_file": server.ca_file,
        "certificate_file": server.certificate_file,
        "key_file": server.key_file,
    }
    return RegistryConfig.model_validate(given | changes)


async def test_a_password_from_a_file_lets_in(server: SecureServer, tmp_path: Path) -> None:
    async with make_registry(config_for(server, tmp_path / "password")) as registry:
        await registry.register(worker("a"), lease_s=60)
        await registry.publish("a", "life-1", block_keys(5))

        assert (await registry.lookup(block_keys(5))).by_worker == {"a": 5}


async def test_a_password_from_the_environment_lets_in(
    server: SecureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRY_PASSWORD", PASSWORD)
    config = config_for(server, tmp_path / "password", password_file=None, password_env="FERRY_PASSWORD")

    async with make_registry(config) as registry:
        await registry.register(worker("b"), lease_s=60)


async def test_a_password_in_the_url_lets_in(server: SecureServer, tmp_path: Path) -> None:
    quoted = PASSWORD.replace("&", "%26")
    config = config_for(
        server,
        tmp_path / "password",
        urls=[server.url(credentials=f"{USER}:{quoted}@")],
        username=None,
        password_file=None,
    )

    async with make_registry(config) as registry:
        await registry.register(worker("c"), lease_s=60)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ca_file": "stranger"}, "connection"),
        ({"certificate_file": None, "key_file": None}, "connection"),
        ({"host": "127.0.0.1"}, "connection"),
        ({"password": WRONG}, "authentication"),
        ({"username": "somebody"}, "authentication"),
    ],
)
async def test_who_is_not_let_in_hears_why_and_no_secret_is_told(
    server: SecureServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str], reason: str
) -> None:
    caplog.set_level(logging.DEBUG)
    host, password = changes.pop("host", "localhost"), changes.pop("password", PASSWORD)
    if "ca_file" in changes:
        changes["ca_file"] = server.stranger_ca_file
    config = config_for(server, tmp_path / "password", urls=[server.url(host)], **changes)
    (tmp_path / "password").write_text(password)
    failures: list[ShardFailure] = []

    async with make_registry(config, ShardHooks(on_failure=failures.append)) as registry:
        with pytest.raises(RegistryError) as caught:
            await registry.register(worker("a"), lease_s=60)

    assert [failure.reason for failure in failures] == [reason]
    told = "\n".join([caplog.text, str(caught.value), repr(failures), repr(caught.value.__cause__)])
    assert f"{host}:{server.port}" in told
    assert not re.search(re.escape(password), told)


async def test_a_certificate_without_the_hosts_name_is_taken_when_asked_to(
    server: SecureServer, tmp_path: Path
) -> None:
    config = config_for(server, tmp_path / "password", urls=[server.url("127.0.0.1")], check_hostname=False)

    async with make_registry(config) as registry:
        await registry.register(worker("d"), lease_s=60)


def test_a_password_that_is_not_where_the_config_says_is_a_config_error(server: SecureServer, tmp_path: Path) -> None:
    config = config_for(server, tmp_path / "password")
    (tmp_path / "password").unlink()

    with pytest.raises(ConfigError, match="password_file"):
        make_registry(config)
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        make_registry(config.model_copy(update={"password_file": None, "password_env": "NO_SUCH_VARIABLE"}))
