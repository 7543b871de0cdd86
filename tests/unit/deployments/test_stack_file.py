"""Commands find what runs on this machine, and nothing that does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.config import AppConfig, demo_config
from deployments.stack_file import find_stack, running_stacks, write_stack_file
from messages.errors import ConfigError, Unavailable


def stack(parent: Path, name: str, http_port: int = 8000) -> AppConfig:
    folder = parent / name
    folder.mkdir()
    config = demo_config(http_port=http_port)
    config = config.model_copy(
        update={"registry": config.registry.model_copy(update={"urls": ["redis://127.0.0.1:7000/0"]})}
    )
    write_stack_file(folder, config)
    return config


def test_the_only_stack_is_found_with_its_whole_config(tmp_path: Path) -> None:
    config = stack(tmp_path, "kvferry-1")

    found = find_stack(parents=[tmp_path])

    assert found.config == config
    assert found.process_id == os.getpid()


def test_the_file_is_for_our_user_only(tmp_path: Path) -> None:
    stack(tmp_path, "kvferry-1")

    (path,) = tmp_path.glob("*/stack.json")
    assert path.stat().st_mode & 0o077 == 0


def test_nothing_that_runs_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no `kvferry serve` runs here"):
        find_stack(parents=[tmp_path])


def test_of_several_the_port_decides(tmp_path: Path) -> None:
    stack(tmp_path, "kvferry-1", 8000)
    second = stack(tmp_path, "kvferry-2", 8010)

    with pytest.raises(ConfigError, match="--http-port: 8000, 8010"):
        find_stack(parents=[tmp_path])
    assert find_stack(8010, parents=[tmp_path]).config == second
    with pytest.raises(Unavailable, match="with HTTP port 8020"):
        find_stack(8020, parents=[tmp_path])


def test_a_stack_whose_process_is_gone_is_not_found(tmp_path: Path) -> None:
    stack(tmp_path, "kvferry-1")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (path,) = tmp_path.glob("*/stack.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"process_id": ended.pid}))

    assert running_stacks([tmp_path]) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"process_id": "x", "config": {}}', '{"process_id": 1}'])
def test_a_file_that_is_not_whole_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "kvferry-1").mkdir()
    (tmp_path / "kvferry-1" / "stack.json").write_text(text)

    assert running_stacks([tmp_path]) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_read(tmp_path: Path) -> None:
    stack(tmp_path, "kvferry-1")
    (path,) = tmp_path.glob("*/stack.json")
    os.chown(path, 12345, 12345)

    assert running_stacks([tmp_path]) == []
