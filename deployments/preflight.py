"""What must hold before anything is started; each check fails with one line that says what to do."""

import contextlib
import json
import math
import socket
from pathlib import Path

import psutil

from deployments.config import AppConfig
from deployments.devices import resolve_dtype
from messages.errors import ConfigError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WORKER_BASE_BYTES = 600 * 1024**2
"""Interpreter, torch and Ray in one worker."""


def check_port(host: str, port: int, *, purpose: str, option: str) -> None:
    """Make sure that nobody listens on `port`.

    Raises:
        ConfigError: The port is taken, or `host` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Only skips connections that linger after a stop; a listener still refuses the bind.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} for {purpose}: {error.strerror}; "
                f"stop what uses port {port} or choose another one with {option}"
            ) from None


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that nobody listens on now."""
    with contextlib.ExitStack() as probes:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sockets = [probes.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


def check_memory(config: AppConfig, folder: Path, available_bytes: int | None = None) -> None:
    """Make sure that weights and KV of every CPU worker fit into this machine's memory.

    Raises:
        ConfigError: They do not; the message says what is needed and what there is.
    """
    needed = memory_needed_bytes(config, folder)
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    if needed > available:
        raise ConfigError(
            f"too little memory: the workers need about {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are available; "
            "lower models.0.kv_memory_bytes, use dtype bfloat16, fewer replicas or a smaller model"
        )


def memory_needed_bytes(config: AppConfig, folder: Path) -> int:
    """Main memory that all workers on the CPU take together: about, and rather more than less."""
    on_cpu = sum(pool.replicas for pool in config.pools if pool.num_gpus == 0)
    dtype = resolve_dtype(config.model.dtype, on_gpu=False)
    weights = checkpoint_parameters(folder) * _DTYPE_BYTES[dtype]
    kv = 0 if config.model.kv_num_blocks else config.model.kv_memory_bytes
    return on_cpu * (weights + kv + _WORKER_BASE_BYTES)


def checkpoint_parameters(folder: Path) -> int:
    """Number of weights in the safetensors files of `folder`, from their headers alone.

    Raises:
        ConfigError: A file is damaged, or there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no *.safetensors file; it is not a checkpoint, or its download broke off")
    return sum(_parameters_in(file) for file in files)


def _parameters_in(file: Path) -> int:
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        raise ConfigError(f"{file} is damaged; fetch the model again") from None
