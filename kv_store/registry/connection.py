"""How a shard is reached: address, user, password and TLS, as redis-py takes them; secrets stay in here."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from messages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAccess:
    """What every connection to the registry says and checks; what a URL says goes before it."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    """Certificates (PEM) of those who may vouch for a server; None takes the system's."""
    certificate_file: str | None = None
    """Our own certificate (PEM), where servers ask for one."""
    key_file: str | None = None
    check_hostname: bool = True
    """Whether a server's certificate must name the host that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """Bounds on the use of one shard."""

    timeout_s: float = 0.5
    """Longest wait for one pipeline, connecting included."""
    cooldown_s: float = 1.0
    """How long a shard that failed is left alone before one caller tries it again."""
    max_connections: int = 16
    """Pipelines in flight at once; more wait."""


_URL_OPTIONS = ("db", "password", "username")
"""After the ? of a URL, as redis-py takes them; the rest are settings of the deployment."""


class ShardAddress:
    """Where one shard is and how to get in. Its name is host:port/db: places keys, labels metrics, has no secret."""

    def __init__(self, url: str, access: ShardAccess | None = None) -> None:
        """Read a URL.

        Raises:
            ConfigError: Not a Redis URL, or one with an option that is not known; the message does not repeat it.
        """
        try:
            query = urlsplit(url).query
            parts: dict[str, Any] = dict(parse_url(url))
        except ValueError as error:
            raise ConfigError("a registry shard must be a redis://, rediss:// or unix:// URL") from error
        unknown = sorted(parse_qs(query, keep_blank_values=True).keys() - set(_URL_OPTIONS))
        if unknown:
            # What stands before an @ may be a part of a password.
            named = "" if "@" in query else f' "{unknown[0]}"'
            raise ConfigError(f"a registry URL has an unknown option{named}; it takes {', '.join(_URL_OPTIONS)}")
        self.host: str = parts.get("host", "localhost")
        self.port: int = int(parts.get("port", 6379))
        self.db: int = int(parts.get("db", 0))
        self.is_socket = "path" in parts
        place = parts["path"] if self.is_socket else f"{self.host}:{self.port}"
        self.name = f"{place}/{self.db}"
        self._options = (
            _options(access or ShardAccess(), has_tls=parts.get("connection_class") is SSLConnection) | parts
        )

    def at(self, host: str, port: int) -> "ShardAddress":
        """Return the address of another server that lets us in the same way."""
        other = object.__new__(ShardAddress)
        other.host, other.port, other.db, other.is_socket = host, port, self.db, False
        other.name = f"{host}:{port}/{self.db}"
        other._options = self._options | {"host": host, "port": port}
        return other

    def make_connection(self, limits: ShardLimits) -> AbstractConnection:
        """Make a connection that opens when it is first used."""
        options = dict(self._options)
        make: type[AbstractConnection] = options.pop("connection_class", Connection)
        return make(
            # The caller bounds a whole pipeline; a timer per reply would cost more than the reply.
            socket_timeout=None,
            socket_connect_timeout=limits.timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **options,
        )


def shard_name(url: str) -> str:
    """Return host:port/db of a Redis URL: what places keys and labels metrics, without a password.

    Raises:
        ConfigError: Not a Redis URL.
    """
    return ShardAddress(url).name


def _options(access: ShardAccess, *, has_tls: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if access.username is not None:
        options["username"] = access.username
    if access.password is not None:
        options["password"] = access.password
    if has_tls:
        options |= {
            "ssl_ca_certs": access.ca_file,
            "ssl_certfile": access.certificate_file,
            "ssl_keyfile": access.key_file,
            "ssl_check_hostname": access.check_hostname,
        }
    return options
