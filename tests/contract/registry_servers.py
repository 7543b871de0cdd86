"""Redis servers that a test starts itself: a cluster of three masters, and one behind TLS and a password."""

import ipaddress
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.backoff import NoBackoff
from redis.retry import Retry

NUM_SLOTS = 16384
USER, PASSWORD = "ferry", "s3cret&word"
ONCE = Retry(NoBackoff(), 0)


def redis_binary() -> str:
    """The redis-server of the machine; the test is skipped without one."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed")
    return binary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RedisServer:
    """One server process, which can be killed and started again under the same address."""

    arguments: list[str]
    port: int
    log: Path
    access: dict[str, object]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.arguments, stdout=output, stderr=output)
        give_up_s = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    if client.info("server")["process_id"] == self.process.pid:
                        return
            except redis.RedisError:
                pass
            if self.process.poll() is not None or time.monotonic() > give_up_s:
                raise AssertionError(self.log.read_text(errors="replace")[-500:])
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(
            **(
                {"host": "127.0.0.1", "port": self.port, "socket_timeout": 5.0, "retry": ONCE, "protocol": 2}
                | self.access
            )
        )


def make_server(folder: Path, number: int, access: dict[str, object] | None = None, **options: str) -> RedisServer:
    """A server that listens on port `number`; options with _ for -."""
    place = folder / str(number)
    place.mkdir(exist_ok=True)
    named = {"bind": "127.0.0.1", "port": str(number), "save": "", "appendonly": "no", "dir": str(place)} | {
        name.replace("_", "-"): value for name, value in options.items()
    }
    words = [word for name, value in named.items() for word in (f"--{name}", *value.split(" "))]
    return RedisServer([redis_binary(), *words], number, place / "server.log", access or {})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Three masters without replicas, a third of the slots each; `servers[i]` serves range i."""

    servers: list[RedisServer]

    @property
    def urls(self) -> list[str]:
        return [f"redis://127.0.0.1:{server.port}" for server in self.servers]

    def move_slot(self, slot: int, source: int, target: int, *, is_finished: bool) -> None:
        """Migrate a slot with its keys; when not finished, the source answers ASK for keys that have left."""
        with self.servers[source].client() as old, self.servers[target].client() as new:
            old_id, new_id = (client.execute_command("CLUSTER MYID") for client in (old, new))
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_id)
            # As two words: under its one name redis-py decodes the keys, which are bytes.
            for key in old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000):
                old.execute_command("MIGRATE", "127.0.0.1", self.servers[target].port, key, 0, 5000)
            if is_finished:
                # The new master first: the old one must not send anybody back to a slot that nobody serves.
                for server in sorted(self.servers, key=lambda server: server is not self.servers[target]):
                    with server.client() as client:
                        client.execute_command("CLUSTER SETSLOT", slot, "NODE", new_id)

    def wait_until_ok(self, num_masters: int = 3) -> None:
        give_up_s = time.monotonic() + 30
        while time.monotonic() < give_up_s:
            if all(_sees(server, num_masters) for server in self.servers):
                return
            time.sleep(0.05)
        raise AssertionError("the cluster did not form")


def _sees(server: RedisServer, num_masters: int) -> bool:
    with server.client() as client:
        info = client.execute_command("CLUSTER INFO")
        words = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
        return words["cluster_state"] == "ok" and len(client.execute_command("CLUSTER SLOTS")) >= num_masters


def _start_node(folder: Path) -> RedisServer:
    server = make_server(
        folder,
        free_port(),
        cluster_enabled="yes",
        cluster_port=str(free_port()),
        cluster_node_timeout="1000",
        # Without it one dead master silences the others too.
        cluster_require_full_coverage="no",
    )
    server.start()
    return server


def _meet(client: redis.Redis, other: RedisServer) -> None:
    bus = int(other.arguments[other.arguments.index("--cluster-port") + 1])
    client.execute_command("CLUSTER MEET", "127.0.0.1", other.port, bus)


@contextmanager
def running_replica(folder: Path, master: RedisServer) -> Iterator[RedisServer]:
    """Start a replica of one master of a cluster, and wait until it has what the master has."""
    replica = _start_node(folder)
    try:
        with replica.client() as client, master.client() as source:
            _meet(client, master)
            master_id = source.execute_command("CLUSTER", "MYID")
            _wait_for(lambda: master_id in client.execute_command("CLUSTER", "NODES"))
            client.execute_command("CLUSTER REPLICATE", master_id)
            _wait_for(lambda: client.info("replication").get("master_link_status") == "up")
        yield replica
    finally:
        replica.kill()


def dump_shard(client: redis.Redis) -> dict[bytes, bytes]:
    """Claims and memory of namespace n on one server, as a replica that is behind would have them."""
    return {name: client.dump(name) for name in client.keys("kvferry/n/[bm]*")}


def restore_shard(client: redis.Redis, state: dict[bytes, bytes]) -> None:
    """Put a server back to where it was, its worker table aside."""
    with client.pipeline(transaction=False) as steps:
        for name in client.keys("kvferry/n/[bm]*"):
            steps.delete(name)
        for name, value in state.items():
            steps.restore(name, 60_000, value)
        steps.execute()


def _wait_for(condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 30
    while not condition():
        if time.monotonic() > give_up_s:
            raise AssertionError("the replica did not get there")
        time.sleep(0.05)


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start three masters and let them meet."""
    with ExitStack() as stack:
        servers = []
        for _ in range(3):
            server = _start_node(folder)
            stack.callback(server.kill)
            servers.append(server)
        bounds = [0, 5461, 10923, NUM_SLOTS]
        for index, server in enumerate(servers):
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
                _meet(client, servers[0])
        cluster = Cluster(servers=servers)
        cluster.wait_until_ok()
        yield cluster


@dataclass(frozen=True, kw_only=True)
class SecureServer:
    """A server that speaks TLS only, asks for a client certificate, and for a user and a password."""

    port: int
    ca_file: str
    certificate_file: str
    key_file: str
    stranger_ca_file: str
    """Certificates of somebody who vouches for nobody here."""

    def url(self, host: str = "localhost", credentials: str = "") -> str:
        return f"rediss://{credentials}{host}:{self.port}/0"


@contextmanager
def secure_server(folder: Path) -> Iterator[SecureServer]:
    """Start a server whose certificate names localhost, but not 127.0.0.1."""
    ca_key, ca = _make_ca("kvferry test CA")
    _, stranger = _make_ca("stranger")
    for name, certificate in (("ca", ca), ("stranger", stranger)):
        (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for name in ("server", "client"):
        _write_signed(folder, name, ca_key, ca)
    users = folder / "users.acl"
    users.write_text(f"user default off\nuser {USER} on >{PASSWORD} ~* +@all\n")
    port = free_port()
    access: dict[str, object] = {
        "host": "localhost",
        "username": USER,
        "password": PASSWORD,
        "ssl": True,
        "ssl_ca_certs": str(folder / "ca.pem"),
        "ssl_certfile": str(folder / "client.pem"),
        "ssl_keyfile": str(folder / "client.key"),
    }
    server = make_server(
        folder,
        port,
        access,
        port="0",
        tls_port=str(port),
        tls_cert_file=str(folder / "server.pem"),
        tls_key_file=str(folder / "server.key"),
        tls_ca_cert_file=str(folder / "ca.pem"),
        tls_auth_clients="yes",
        aclfile=str(users),
    )
    try:
        server.start()
        yield SecureServer(
            port=port,
            ca_file=str(folder / "ca.pem"),
            certificate_file=str(folder / "client.pem"),
            key_file=str(folder / "client.key"),
            stranger_ca_file=str(folder / "stranger.pem"),
        )
    finally:
        server.kill()


def _make_ca(name: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        _builder(subject, subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _write_signed(folder: Path, name: str, ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.9"))])
    certificate = (
        _builder(subject, ca.subject, key.public_key())
        .add_extension(names, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
    )
