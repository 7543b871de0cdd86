"""A worker's cores and niceness, for every thread of its process: Linux keeps both per thread.

Threads that start later inherit them from the one that starts them, torch's own among them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from messages.errors import ConfigError


def bind_process(cores: Sequence[int] | None, nice: int) -> int:
    """Keep all threads of this process on `cores`, and make them give way by `nice`.

    Args:
        cores: None to leave them where they are.
        nice: Added to the niceness of the calling thread; 0 to leave all as they are.

    Returns:
        Cores that the process may run on now.

    Raises:
        ConfigError: This machine has no such core.
    """
    allowed = os.sched_getaffinity(0) if cores is None else set(cores)
    level = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    bound: set[int] = set()
    # A thread that is not bound yet may start another one meanwhile.
    while fresh := {int(task.name) for task in Path("/proc/self/task").iterdir()} - bound:
        for thread in fresh:
            _bind(thread, allowed if cores is not None else None, level if nice else None)
        bound |= fresh
    return len(allowed)


def _bind(thread: int, cores: set[int] | None, level: int | None) -> None:
    try:
        if cores is not None:
            os.sched_setaffinity(thread, cores)
        if level is not None:
            os.setpriority(os.PRIO_PROCESS, thread, level)
    except ProcessLookupError:
        # It has ended.
        return
    except OSError as error:
        raise ConfigError(
            f"cpu_affinity {sorted(cores or ())} and nice cannot be set: {error.strerror}; "
            f"this machine offers cores {sorted(os.sched_getaffinity(0))}"
        ) from error
