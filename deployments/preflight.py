"""What must hold before anything is started; each check fails with one line that says what to do."""

import contextlib
import socket
from pathlib import Path

from deployments.config import AppConfig
from deployments.devices import device_for, resolve_dtype
from engine.checkpoints import open_checkpoint
from engine.main_memory import free_main_memory
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


def check_memory(config: AppConfig, model: Path, available_bytes: int | None = None) -> None:
    """Make sure that weights and KV of every CPU worker fit into this machine's memory.

    Args:
        config: What is to be started.
        model: Folder of the checkpoint, or its GGUF file.
        available_bytes: What there is; None to look.

    Raises:
        ConfigError: They do not fit, and the message says what is needed and what there is; or the checkpoint is bad.
    """
    needed = memory_needed_bytes(config, model)
    available = free_main_memory() if available_bytes is None else available_bytes
    if needed > available:
        raise ConfigError(
            f"too little memory: the workers need about {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are available; "
            "lower models.0.kv_memory_bytes, use dtype bfloat16, fewer replicas or a smaller model"
        )


def settle_kv_memory(config: AppConfig, model: Path, available_bytes: int | None = None) -> AppConfig:
    """Turn a share of this machine's memory into bytes, the same for each of its CPU workers.

    A worker that starts again later then gets what it had, whatever the others hold. Other configs stay as they are.

    Args:
        config: All its workers run on this machine.
        model: Folder of the checkpoint, or its GGUF file.
        available_bytes: What there is; None to look.
    """
    settings = config.model
    if settings.kv_num_blocks is not None or settings.kv_bytes(on_gpu=False) is not None:
        return config
    if any(device_for(pool.num_gpus) != "cpu" for pool in config.pools):
        return config
    available = free_main_memory() if available_bytes is None else available_bytes
    free = max(0, available - memory_needed_bytes(config, model))
    kv_bytes = max(1, int(settings.kv_share() * free) // _num_cpu_workers(config))
    return config.model_copy(update={"models": [settings.model_copy(update={"kv_memory_bytes": kv_bytes})]})


def memory_needed_bytes(config: AppConfig, model: Path) -> int:
    """Main memory that all workers on the CPU take together: about, and rather more than less.

    KV that is given in blocks or as a share of what is free is left out; the worker checks it.
    """
    dtype = resolve_dtype(config.model.dtype, on_gpu=False)
    weights = open_checkpoint(model).num_parameters * _DTYPE_BYTES[dtype]
    kv = 0 if config.model.kv_num_blocks else config.model.kv_bytes(on_gpu=False) or 0
    return _num_cpu_workers(config) * (weights + kv + _WORKER_BASE_BYTES)


def _num_cpu_workers(config: AppConfig) -> int:
    return sum(pool.replicas for pool in config.pools if device_for(pool.num_gpus) == "cpu")
