"""All live workers as placements see them, kept current by the newest heartbeats of their links."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.pool_board import PoolBoard, SpillRules, WorkerLoads
from cluster.pools import PoolSpec
from cluster.reuse import ReuseRules
from cluster.snapshot import Snapshot
from deployments.worker_links import WorkerLink
from deployments.worker_views import facts_of, load_of
from messages.v1 import worker_pb2 as pb


class LiveWorkers(Protocol):
    """Where links to workers are found."""

    def live(self) -> list[WorkerLink]:
        """Workers that take new requests."""
        ...


class Fleet:
    """A snapshot and a board of pools that agree; `refresh` before each use.

    Args:
        links: To the workers.
        pools: Workers of other pools take no part.
        spill: When a pool's requests may go to others.
        assumed: Rates of workers that have measured none.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        links: LiveWorkers,
        pools: Sequence[PoolSpec],
        spill: SpillRules,
        assumed: ReuseRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links = links
        self.snapshot = Snapshot(pools, assumed)
        self.board = PoolBoard(pools, spill, clock)
        self._seen: dict[str, tuple[WorkerLink, pb.Load]] = {}
        """What the snapshot has of each worker."""

    def refresh(self) -> None:
        """Take over heartbeats that came, workers that joined, and workers that take no requests any more."""
        live = {link.record.worker_id: (link, link.load) for link in self._links.live() if link.load is not None}
        changed = False
        for worker_id in self._seen.keys() - live.keys():
            self.snapshot.remove(worker_id)
            del self._seen[worker_id]
            changed = True
        for worker_id, (link, load) in live.items():
            seen = self._seen.get(worker_id)
            if seen is None or seen[1] is not load:
                self.snapshot.update(facts_of(link), load_of(load, link.record.block_size))
                self._seen[worker_id] = (link, load)
                changed = True
        if changed:
            self._observe()

    def capacity_tokens(self) -> int:
        """KV tokens of all live workers that decode."""
        self.refresh()
        columns = self.snapshot.columns
        return int(columns.total_tokens[columns.can_decode].sum())

    def link(self, worker_id: str) -> WorkerLink | None:
        """The link to a live worker, as of the last refresh."""
        seen = self._seen.get(worker_id)
        return None if seen is None else seen[0]

    def _observe(self) -> None:
        columns = self.snapshot.columns
        self.board.observe(
            columns.pool,
            WorkerLoads(
                queued_prefill_tokens=columns.queued_prefill_tokens,
                prefill_tokens_s=columns.prefill_tokens_s,
                free_tokens=columns.free_tokens,
                total_tokens=columns.total_tokens,
            ),
        )
