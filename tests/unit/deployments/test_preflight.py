"""Checks before the start: ports, checkpoint, memory."""

import json
import socket
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

from deployments.config import AppConfig, load_config
from deployments.preflight import check_memory, check_port, free_ports, memory_needed_bytes, settle_kv_memory
from messages.errors import ConfigError

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def checkpoint(folder: Path, shapes: dict[str, list[int]], *, name: str = "model.safetensors") -> Path:
    header = {tensor: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for tensor, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text)
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


def test_weights_are_counted_over_all_shards(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"a": [3, 500], "b": [7]}, name="model-1.safetensors")
    checkpoint(folder, {"scalar": [], "c": [1000]}, name="model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-1.safetensors", "scalar": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    few = checkpoint(tmp_path / "few", {"a": [7]})

    config = config_with(dtype="float32")

    assert memory_needed_bytes(config, folder) - memory_needed_bytes(config, few) == 2 * 4 * (1500 + 1 + 1000)


def test_weights_of_a_gguf_file_are_counted_as_the_floats_they_become(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("a", quantize(np.zeros((100, 32), np.float32), Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    few = checkpoint(tmp_path / "few", {"a": [7]})

    config = config_with(dtype="bfloat16")

    assert memory_needed_bytes(config, tmp_path) - memory_needed_bytes(config, few) == 2 * 2 * (3200 - 7)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"garbage garbage garbage")

    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        check_memory(config_with(), tmp_path)


def test_a_share_becomes_bytes_that_leave_room_for_every_worker(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"a": [1000, 1000]})
    config = config_with(dtype="float32", kv_memory_share=0.5)
    needed = memory_needed_bytes(config, folder)

    settled = settle_kv_memory(config, folder, available_bytes=needed + 8_000_000)

    assert settled.model.kv_memory_bytes == 2_000_000
    assert settle_kv_memory(settled, folder, available_bytes=10**12) == settled


@pytest.mark.parametrize("fields", [{}, {"kv_memory_bytes": 5, "kv_memory_share": 0.5}, {"kv_num_blocks": 5}])
def test_kv_memory_that_is_not_a_share_stays_as_it_is(tmp_path: Path, fields: dict[str, object]) -> None:
    config = config_with(**fields)

    assert settle_kv_memory(config, checkpoint(tmp_path / "m", {"a": [10]})) == config


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
