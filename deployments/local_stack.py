"""A whole KVFerry on this machine: registry, Ray, gateway and workers, up inside `with` and gone after it."""

import contextlib
import http.client
import math
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from ray.serve import Application

from deployments import watchdog
from deployments.app import build
from deployments.config import AppConfig
from deployments.local_ray import LocalRay
from deployments.model_source import Progress, resolve_model
from deployments.preflight import check_memory, check_port, settle_kv_memory
from deployments.stack_file import FOLDER_PREFIX, write_stack_file
from kv_store.embedded import EmbeddedValkey
from messages.errors import DeadlineExceeded, Unavailable

_POLL_S = 0.2
_STOP_MARGIN_S = 15.0
_LONGEST_TEMP = 30
"""Characters of a temporary folder's path that leave room for Ray's socket names."""


class LocalStack:
    """Every process of one deployment; when `with` ends, by whatever way, none is left.

    Args:
        config: What to start. Hub ids and the demo are fetched first.
        on_stage: Called with each stage in words, from the thread that enters.
        on_progress: Called while a model is fetched.
        start_timeout_s: Give up when the system is not ready by then.
        is_verbose: Show the output of Ray and of the replicas.
        describe: Makes the Serve application from the config.
    """

    def __init__(
        self,
        config: AppConfig,
        on_stage: Callable[[str], None],
        *,
        on_progress: Progress | None = None,
        start_timeout_s: float = 900.0,
        is_verbose: bool = False,
        describe: Callable[[AppConfig], Application] = build,
    ) -> None:
        self.config = config
        """As given; once up, with the model's folder and the registry's URLs filled in."""
        self._on_stage = on_stage
        self._on_progress = on_progress
        self._start_timeout_s = start_timeout_s
        self._is_verbose = is_verbose
        self._describe = describe
        self._mark = secrets.token_hex(8)
        self._folder: Path | None = None
        self._ray: LocalRay | None = None
        self._cleanup = contextlib.ExitStack()

    @property
    def grpc_address(self) -> str:
        """host:port for the SDK."""
        return f"{_reachable(self.config.gateway.host)}:{self.config.gateway.grpc_port}"

    @property
    def http_url(self) -> str:
        """Where the HTTP API is, without /v1."""
        return f"http://{_reachable(self.config.gateway.host)}:{self.config.gateway.http_port}"

    def __enter__(self) -> Self:
        """Start everything and wait until the gateway is ready.

        Raises:
            ConfigError: A port is taken, the model is missing, memory is too small; nothing was started.
            Unavailable: A worker or the gateway did not start; nothing is left behind.
            DeadlineExceeded: Not ready after `start_timeout_s`; nothing is left behind.
        """
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._on_stage("draining and stopping")
        finally:
            self._cleanup.close()

    def kill(self) -> None:
        """End every process at once, without draining."""
        if self._folder is not None:
            watchdog.sweep(self._mark, str(self._folder), grace_s=0.0)

    def is_alive(self) -> bool:
        """Whether Ray itself still runs."""
        return self._ray is not None and self._ray.is_alive()

    def _start(self) -> None:
        gateway = self.config.gateway
        self._on_stage("checking ports, model and memory")
        check_port(gateway.host, gateway.grpc_port, purpose="gRPC", option="--grpc-port")
        check_port(gateway.host, gateway.http_port, purpose="HTTP", option="--http-port")
        model = resolve_model(self.config.model.source, self._on_progress)
        check_memory(self.config, model)
        self.config = settle_kv_memory(self.config, model)
        self._folder = self._cleanup.enter_context(self._private_folder())
        self.config = _located(self.config, model, self._registry_urls(self._folder))
        self._on_stage("starting Ray")
        self._ray = self._cleanup.enter_context(self._local_ray(self._folder))
        self._on_stage(f"loading {self.config.model.name} in {_count_workers(self.config)}")
        self._ray.deploy(self._describe(self.config))
        self._wait_until_ready(self._ray)
        write_stack_file(self._folder, self.config)

    def _registry_urls(self, folder: Path) -> list[str]:
        registry = self.config.registry
        if registry.urls:
            return registry.urls
        self._on_stage(f"starting the registry, {registry.embedded_shards} shards")
        place = folder / "registry"
        place.mkdir()
        return list(self._cleanup.enter_context(EmbeddedValkey(registry.embedded_shards, place)).urls)

    def _local_ray(self, folder: Path) -> LocalRay:
        pools, gateway = self.config.pools, self.config.gateway
        booked = sum(pool.num_cpus * pool.replicas for pool in pools) + gateway.num_cpus
        # Ray starts as many processes in advance as it has CPUs; the gateway and Serve's controller need one each.
        num_processes = sum(pool.replicas for pool in pools) + 2
        place, scratch = folder / "ray", folder / "tmp"
        place.mkdir()
        scratch.mkdir()
        return LocalRay(
            place,
            num_cpus=max(num_processes, math.ceil(booked) + 1),
            environment={
                watchdog.MARK: self._mark,
                # Libraries leave caches in the temporary folder; this one goes away with the stack.
                "TMPDIR": str(scratch),
                "TOKENIZERS_PARALLELISM": "false",
                "RAY_USAGE_STATS_ENABLED": "0",
                # Ray's own default is 15; a pool's `nice` decides here.
                "RAY_worker_niceness": "0",
                # Workers share the cores: threads that spin while they wait take them from each other.
                "OMP_WAIT_POLICY": "PASSIVE",
            },
            stop_timeout_s=self.config.gateway.drain_s + _STOP_MARGIN_S,
            is_verbose=self._is_verbose,
        )

    def _wait_until_ready(self, cluster: LocalRay) -> None:
        deadline_s = time.monotonic() + self._start_timeout_s
        while not self._is_ready():
            if not cluster.is_alive():
                raise Unavailable("Ray ended while the workers started; try again with --verbose")
            failure = cluster.start_failure()
            if failure is not None:
                raise Unavailable(failure)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"not ready after {self._start_timeout_s:.0f} s; try again with --verbose")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        gateway = self.config.gateway
        connection = http.client.HTTPConnection(_reachable(gateway.host), gateway.http_port, timeout=2.0)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @contextlib.contextmanager
    def _private_folder(self) -> Iterator[Path]:
        """A folder of our own, and a watchdog that empties it and ends its processes even if we are killed."""
        parent = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent if len(parent) <= _LONGEST_TEMP else "/tmp")  # noqa: S108  (mkdtemp makes it private)
        command = [sys.executable, "-I", "-S", watchdog.__file__, self._mark, folder]
        guard = subprocess.Popen(  # noqa: S603  (our own file)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},
        )
        try:
            yield Path(folder)
        finally:
            watchdog.sweep(self._mark, folder)
            guard.communicate()


def _located(config: AppConfig, model: Path, urls: list[str]) -> AppConfig:
    return config.model_copy(
        update={
            "models": [config.model.model_copy(update={"source": str(model)})],
            "registry": config.registry.model_copy(update={"urls": urls}),
        }
    )


def _count_workers(config: AppConfig) -> str:
    num_workers = sum(pool.replicas for pool in config.pools)
    return "1 worker" if num_workers == 1 else f"{num_workers} workers"


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (compared, not bound)
