"""Files of a checkpoint: found, identified, measured, and named when they are broken."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints import gguf_file, open_checkpoint
from engine.tensor_files import read_gguf
from engine.weights import load_model
from messages.errors import ConfigError
from tests.unit.engine.tiny_checkpoints import make_reference, save_checkpoint, save_gguf


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_parameters_are_counted_in_one_file_and_in_shards(tmp_path: Path, shard: str) -> None:
    folder = save_checkpoint(tmp_path, max_shard_size=shard)

    checkpoint = open_checkpoint(folder)

    assert checkpoint.num_parameters == sum(p.numel() for p in make_reference().parameters())
    assert len(checkpoint.files) == len(list(folder.glob("*.safetensors")))


def test_a_tied_weight_counts_once(tmp_path: Path) -> None:
    apart = open_checkpoint(save_checkpoint(tmp_path / "apart"))
    tied = open_checkpoint(save_checkpoint(tmp_path / "tied", "llama-tied"))

    assert apart.num_parameters - tied.num_parameters == 97 * 64


def test_a_gguf_file_counts_its_weights_whatever_they_are_stored_as(tmp_path: Path) -> None:
    plain = open_checkpoint(save_gguf(tmp_path / "plain.gguf"))

    assert plain.num_parameters == sum(p.numel() for p in make_reference().parameters())
    assert (plain.folder, plain.gguf_name) == (tmp_path, "plain.gguf")


def test_a_folder_means_its_only_gguf_file(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "a.gguf")

    assert gguf_file(tmp_path) == file
    assert gguf_file(save_checkpoint(tmp_path / "plain")) is None

    (tmp_path / "b.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"2 \.gguf files; give the path of one"):
        gguf_file(tmp_path)


def test_safetensors_go_before_gguf(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    save_gguf(tmp_path / "a.gguf")

    assert open_checkpoint(tmp_path).gguf_name is None


def test_the_digest_depends_on_weights_and_config_and_not_on_the_place(tmp_path: Path) -> None:
    here, there = save_checkpoint(tmp_path / "a"), save_checkpoint(tmp_path / "b")
    same = open_checkpoint(here).digest

    assert open_checkpoint(there).digest == same

    tensors = load_file(there / "model.safetensors")
    changed = {name: value + 1 if "layers.2.mlp.up" in name else value for name, value in tensors.items()}
    save_file(changed, there / "model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(there).digest != same

    config = json.loads((here / "config.json").read_text())
    (here / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert open_checkpoint(here).digest != same


def test_the_digest_of_a_gguf_file_depends_on_its_weights(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "a.gguf")
    before = open_checkpoint(file).digest
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.gguf").write_bytes(file.read_bytes())

    assert open_checkpoint(tmp_path / "b").digest == before

    data = bytearray(file.read_bytes())
    tensor = read_gguf(file).tensors[4]
    data[(tensor.start + tensor.end) // 2] ^= 1
    file.write_bytes(data)
    assert open_checkpoint(file).digest != before


@pytest.mark.parametrize("cut", [100, 10_000])
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_file_that_ends_too_early_is_named(tmp_path: Path, name: str, cut: int) -> None:
    file = save_gguf(tmp_path / name) if name.endswith("gguf") else save_checkpoint(tmp_path) / name
    file.write_bytes(file.read_bytes()[:-cut])

    with pytest.raises(ConfigError, match=rf"{name} is not a complete .* file"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=name):
        load_model(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", b"garbage garbage garbage"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError, match=rf"{name} is damaged"):
        open_checkpoint(tmp_path)


def test_every_cut_of_a_gguf_head_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    whole = save_gguf(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"

    for length in (0, 3, 4, 8, 20, 30, 60, 200, 1000, 3000, 5000):
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_an_unknown_gguf_version_is_named(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "a.gguf")
    file.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + file.read_bytes()[8:])

    with pytest.raises(ConfigError, match="GGUF version 9"):
        read_gguf(file)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, max_shard_size="100KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()

    with pytest.raises(ConfigError, match=lost.name):
        open_checkpoint(folder)


def test_a_shard_of_another_checkpoint_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, max_shard_size="100KB")
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())

    with pytest.raises(ConfigError, match=rf"{second.name} lacks"):
        open_checkpoint(folder)


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')

    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        open_checkpoint(tmp_path)


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")

    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle, which can run code"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors or \.gguf file"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.gguf"):
        open_checkpoint(tmp_path / "nothing.gguf")

    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors, but neither"):
        open_checkpoint(tmp_path)
