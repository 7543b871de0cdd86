"""How long bytes take on a link of a given rate that all reads share."""

import asyncio
import time

BYTES_PER_GB = 1e9


class SharedLink:
    """A link that carries one byte at a time; who books later waits for those before.

    Args:
        gb_s: Rate in GB/s, 1 GB = 10^9 bytes.
    """

    def __init__(self, gb_s: float) -> None:
        self._bytes_per_s = gb_s * BYTES_PER_GB
        self._free_at_s = 0.0

    def book(self, size_bytes: int, now_s: float) -> float:
        """Take the link for `size_bytes` from `now_s` on, or as soon as it is free.

        Returns:
            When the last byte is here.
        """
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
        return self._free_at_s


async def wait_until(at_s: float) -> None:
    """Wait for a moment of the monotonic clock."""
    rest_s = at_s - time.monotonic()
    if rest_s > 0:
        await asyncio.sleep(rest_s)
