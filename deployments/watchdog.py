"""Nothing stays behind: find every process of one local stack, end it, remove its folder.

The stack runs this file as a program of its own that waits for its standard input to close. That happens also when
the stack is killed with SIGKILL and can clean up nothing itself. Standard library only, so that it starts in 20 ms.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "KVFERRY_STACK"
_GRACE_S = 2.0
_POLL_S = 0.05


def processes_of(mark: str, folder: str) -> list[int]:
    """Process ids, not the caller's, that carry `mark` in their environment or are Ray's and use a file in `folder`.

    Both, because Ray's agents overwrite their environment when they rename themselves.
    """
    own = os.getpid()
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid != own and (_is_marked(pid, mark) or _is_ray_in(pid, folder))]


def _is_marked(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def _is_ray_in(pid: int, folder: str) -> bool:
    try:
        is_ray = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
        return is_ray and any(_target(entry).startswith(f"{folder}/") for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def sweep(mark: str, folder: str, *, grace_s: float = _GRACE_S) -> list[int]:
    """Wait `grace_s` for the stack's processes to end, kill what is left, remove `folder`.

    Returns:
        Ids of the processes that had to be killed.
    """
    deadline_s = time.monotonic() + grace_s
    while (left := processes_of(mark, folder)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    killed = list(left)
    while left:
        for pid in left:
            _kill(pid)
        time.sleep(_POLL_S)
        left = [pid for pid in processes_of(mark, folder) if not _is_zombie(pid)]
    shutil.rmtree(folder, ignore_errors=True)
    return killed


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1], sys.argv[2])
