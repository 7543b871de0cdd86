"""From "who holds block i" to "how many leading blocks does each worker hold", in batches with early exit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kv_store.registry.protocol import PrefixHits
from messages.handoff import BlockKey

FIRST_BATCH = 32
MAX_BATCH = 512
"""Shard and reader both work a batch off without turning to anybody else, so it is bounded."""


def growing_batches(keys: Sequence[BlockKey]) -> Iterator[Sequence[BlockKey]]:
    """Yield `keys` in order, in runs of 32, 64, 128, ... up to 512."""
    start, size = 0, FIRST_BATCH
    while start < len(keys):
        yield keys[start : start + size]
        start += size
        size = min(2 * size, MAX_BATCH)


class PrefixScan:
    """Walks a prompt's blocks in order; a worker is open until its first missing block."""

    def __init__(self, live: Mapping[str, str]) -> None:
        """Start a scan.

        Args:
            live: Current life by worker id, as claims name it; nobody else counts.
        """
        self._live = live
        self._open = set(live)
        self._hits: dict[str, int] = {}
        self._position = 0
        self._unknown = False
        self.num_stale = 0
        """Claims met so far whose life has ended; they count for nobody."""

    @property
    def is_open(self) -> bool:
        """Whether a later block could still extend some worker's prefix."""
        return bool(self._open)

    def advance(self, rows: Iterable[Mapping[str, str] | None]) -> None:
        """Take the next blocks in order.

        Args:
            rows: Per block, the life under which each holder published it; None when its shard is silent.
        """
        for row in rows:
            if not self._open:
                return
            self._position += 1
            if row is None:
                # May be held: a run goes on over it, but only a later confirmed block makes it count.
                self._unknown = True
                continue
            self._open = {worker for worker in self._open if row.get(worker) == self._live[worker]}
            if len(row) > len(self._open):
                self.num_stale += sum(self._live.get(worker) != life for worker, life in row.items())
            for worker in self._open:
                self._hits[worker] = self._position

    def hits(self) -> PrefixHits:
        """Return what has been found so far."""
        return PrefixHits(by_worker=dict(self._hits), unknown=self._unknown)
