"""Main memory that this process may still take: of the machine, or of the container it runs in."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def free_main_memory(cgroup: Path = CGROUP) -> int:
    """Main memory that this process may still take, in bytes; a container's limit counts."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        # Pages of files that can be given back at once count as used there.
        reclaimable = _inactive_file_bytes((cgroup / "memory.stat").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + reclaimable))


def _inactive_file_bytes(stat: str) -> int:
    return next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
