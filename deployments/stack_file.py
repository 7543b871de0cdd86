"""How commands find a system that `kvferry serve` runs on this machine: a file in the stack's private folder.

The folder, and the file with it, go away with the stack, whatever ends it. Only folders of our own user count.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deployments.config import AppConfig, parse_config
from messages.errors import ConfigError, Unavailable

FOLDER_PREFIX = "kvferry-"
_NAME = "stack.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStack:
    """A system that runs on this machine."""

    process_id: int
    config: AppConfig
    """As it runs: with the registry's URLs and the model's folder."""

    @property
    def http_port(self) -> int:
        """Tells stacks apart."""
        return self.config.gateway.http_port


def write_stack_file(folder: Path, config: AppConfig) -> None:
    """Leave word in `folder` of a stack that is up; the file appears whole, and for our user only."""
    text = json.dumps({"process_id": os.getpid(), "config": config.model_dump(mode="json")})
    draft = folder / f"{_NAME}.new"
    draft.touch(mode=0o600)
    draft.write_text(text, encoding="utf-8")
    draft.replace(folder / _NAME)


def running_stacks(parents: list[Path] | None = None) -> list[RunningStack]:
    """Find the stacks of our user whose process is alive.

    Args:
        parents: Where stacks have their folders; None for the system's temporary folders.
    """
    places = parents or [Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108  (read, and only what is ours)
    found = sorted({path for place in places for path in place.glob(f"{FOLDER_PREFIX}*/{_NAME}")})
    return [stack for stack in map(_read, found) if stack is not None]


def find_stack(http_port: int | None = None, parents: list[Path] | None = None) -> RunningStack:
    """Find the one stack that is meant.

    Args:
        http_port: Of its gateway; None when only one runs.
        parents: See `running_stacks`.

    Raises:
        Unavailable: None runs, or none with that port.
        ConfigError: Several run and no port was given.
    """
    stacks = running_stacks(parents)
    if http_port is not None:
        stacks = [stack for stack in stacks if stack.http_port == http_port]
    if not stacks:
        which = "" if http_port is None else f" with HTTP port {http_port}"
        raise Unavailable(
            f"no `kvferry serve`{which} runs here for this user; give --config with registry.urls for another system"
        )
    if len(stacks) > 1:
        ports = ", ".join(str(stack.http_port) for stack in stacks)
        raise ConfigError(f"several systems run here; choose one with --http-port: {ports}")
    return stacks[0]


def _read(path: Path) -> RunningStack | None:
    """Read a stack file; None when it is not ours, not whole, or its stack is gone."""
    try:
        if path.stat().st_uid != os.getuid() or path.parent.stat().st_uid != os.getuid():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        os.kill(int(data["process_id"]), 0)
        return RunningStack(process_id=int(data["process_id"]), config=parse_config(data["config"]))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
