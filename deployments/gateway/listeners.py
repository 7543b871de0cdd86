"""Both doors of a gateway on their ports: bound before anything starts, stopped after a drain."""

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import grpc
import uvicorn
from prometheus_client import CollectorRegistry

from deployments.gateway.grpc_door import make_grpc_server
from deployments.gateway.http import make_http_app
from deployments.service import GenerationService
from messages.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_DRAIN_S = 30.0
_BACKLOG = 2048
_CUT_GRACE_S = 2


class Listeners:
    """The gRPC and the HTTP server of one gateway; port 0 takes a free one."""

    def __init__(
        self,
        service: GenerationService,
        host: str,
        grpc_port: int,
        http_port: int,
        metrics_registry: CollectorRegistry,
        drain_s: float = DEFAULT_DRAIN_S,
    ) -> None:
        self.grpc_port = grpc_port
        """The real port once started."""
        self.http_port = http_port
        """The real port once started."""
        self._service = service
        self._host = host
        self._drain_s = drain_s
        self._grpc_server: grpc.aio.Server | None = None
        cut = asyncio.Event()
        self._http_server = _Uvicorn(
            uvicorn.Config(
                make_http_app(service, metrics_registry, cut),
                lifespan="off",
                log_config=None,
                access_log=False,
                ws="none",
                server_header=False,
                proxy_headers=False,
            ),
            cut,
        )
        self._http_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Bind both ports, then serve.

        Raises:
            ConfigError: A port is taken or the host is no address of this machine; nothing was started.
        """
        # Both ports are known to be free before either server takes one.
        with _bind(self._host, self.http_port, "HTTP", "--http-port") as http_socket:
            _bind(self._host, self.grpc_port, "gRPC", "--grpc-port").close()
            self._grpc_server = make_grpc_server(self._service)
            self.grpc_port = self._add_grpc_port(self._grpc_server)
            self.http_port = http_socket.getsockname()[1]
            served = http_socket.dup()
        try:
            await self._grpc_server.start()
            self._http_task = asyncio.create_task(self._http_server.serve(sockets=[served]), name="http-door")
            await self._http_server.is_up.wait()
        except BaseException:
            served.close()
            await asyncio.shield(self.stop(0.0))
            raise
        log.info("gateway.listening host=%s grpc_port=%d http_port=%d", self._host, self.grpc_port, self.http_port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop, with the drain time given at construction."""
        await self.stop(self._drain_s)

    async def stop(self, drain_s: float) -> None:
        """Take nothing new at once, let running requests end for `drain_s` seconds, then cut them. Idempotent."""
        http_task, self._http_task = self._http_task, None
        grpc_server, self._grpc_server = self._grpc_server, None
        stopping = [] if grpc_server is None else [grpc_server.stop(drain_s)]
        if http_task is not None:
            stopping.append(self._http_server.stop(http_task, drain_s))
        await asyncio.gather(*stopping)

    def _add_grpc_port(self, server: grpc.aio.Server) -> int:
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            return server.add_insecure_port(f"{host}:{self.grpc_port}")
        except RuntimeError as error:
            raise _in_use(self.grpc_port, "gRPC", "--grpc-port") from error


class _Uvicorn(uvicorn.Server):
    """A uvicorn that is a guest in the event loop: signals belong to the process."""

    def __init__(self, config: uvicorn.Config, cut: asyncio.Event) -> None:
        super().__init__(config)
        self._cut = cut
        self.is_up = asyncio.Event()

    async def stop(self, serving: asyncio.Task[None], drain_s: float) -> None:
        """Drain, cut what is left after `drain_s` seconds, and wait until it is gone."""
        cutting = asyncio.get_running_loop().call_later(drain_s, self._cut.set)
        # Only for what does not hear of the cut, such as a body that is still being sent.
        self.config.timeout_graceful_shutdown = math.ceil(drain_s) + _CUT_GRACE_S
        self.should_exit = True
        await serving
        cutting.cancel()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int, door: str, option: str) -> socket.socket:
    """Bind exclusively: without SO_REUSEPORT, a port that anybody listens on is refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f'host "{host}" is no address: {error}', host=host) from error
    bound = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections are still in TIME_WAIT is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise _in_use(port, door, option) from error
        raise ConfigError(f'cannot listen on "{host}" port {port} ({door}): {error.strerror}', port=port) from error
    return bound


def _in_use(port: int, door: str, option: str) -> ConfigError:
    return ConfigError(f"port {port} ({door}) is in use; choose another with {option} (0: any free port)", port=port)
