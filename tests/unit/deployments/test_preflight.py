"""Checks before the start: ports, checkpoint, memory."""

import json
import socket
from pathlib import Path

import pytest

from deployments.config import AppConfig, load_config
from deployments.preflight import check_memory, check_port, checkpoint_parameters, free_ports, memory_needed_bytes
from messages.errors import ConfigError


def checkpoint(folder: Path, shapes: dict[str, list[int]]) -> Path:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


def config_with(**overrides: object) -> AppConfig:
    return load_config(None, {f"models.0.{name}": value for name, value in overrides.items()})


def test_a_port_with_a_listener_is_named_with_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} for gRPC: Address already in use.*--grpc-port"):
            check_port("127.0.0.1", port, purpose="gRPC", option="--grpc-port")


def test_a_listener_with_so_reuseport_is_seen_too() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server, pytest.raises(ConfigError):
        check_port("127.0.0.1", server.getsockname()[1], purpose="gRPC", option="--grpc-port")


def test_a_free_port_passes_and_stays_free() -> None:
    ports = free_ports(3)

    assert len(set(ports)) == 3
    for port in ports:
        check_port("127.0.0.1", port, purpose="HTTP", option="--http-port")
        socket.create_server(("127.0.0.1", port)).close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        check_port("203.0.113.1", 9000, purpose="gRPC", option="--grpc-port")


def test_parameters_are_counted_over_all_tensors(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"a": [3, 5], "b": [7], "scalar": []})

    assert checkpoint_parameters(folder) == 15 + 7 + 1


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", b"garbage garbage garbage"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        checkpoint_parameters(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        checkpoint_parameters(tmp_path)


def test_memory_grows_with_dtype_and_kv_and_counts_both_workers(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"a": [1000, 1000]})
    wide = memory_needed_bytes(config_with(dtype="float32", kv_memory_bytes=2**20), folder)
    narrow = memory_needed_bytes(config_with(dtype="bfloat16", kv_memory_bytes=2**20), folder)
    more_kv = memory_needed_bytes(config_with(dtype="float32", kv_memory_bytes=2**21), folder)

    assert wide - narrow == 2 * 2 * 10**6
    assert more_kv - wide == 2 * 2**20


def test_workers_on_a_gpu_need_no_main_memory(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"a": [10]})
    config = load_config(None, {"pools.0.num_gpus": 1.0, "pools.1.num_gpus": 1.0})

    assert memory_needed_bytes(config, folder) == 0


def test_too_little_memory_says_how_much_and_what_to_do(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"a": [10]})

    check_memory(config_with(), folder, available_bytes=2**40)
    with pytest.raises(ConfigError, match=r"need about 3\.4 GB, 1\.0 GB are available; lower models\.0\.kv_memory"):
        check_memory(config_with(), folder, available_bytes=10**9)
