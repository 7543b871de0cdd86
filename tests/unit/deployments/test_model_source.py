"""From a model's source to a folder, without a network."""

from pathlib import Path

import pytest

from deployments.model_source import resolve_model
from messages.errors import ConfigError


def test_a_checkpoint_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("source", ["./nothing-here", "/nothing/here", "~nobody/x", "word", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_says_what_to_give(source: str) -> None:
    with pytest.raises(ConfigError, match=r"give .*demo.*folder.*hub id"):
        resolve_model(source)


def test_a_gguf_file_is_taken_by_its_path_or_by_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    assert resolve_model(str(file)) == file.resolve()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(ConfigError, match=r"\.gguf file"):
        resolve_model(str(tmp_path / "other.gguf"))
