"""The worker table as one reader sees it: a copy per shard, and the one truth made of them."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, cast

from kv_store.registry.key_names import life_of
from kv_store.registry.protocol import WorkerRecord
from messages.errors import RegistryError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """A row of the table, with the shard's durations put on the reader's clock."""

    record: WorkerRecord
    expires_at_s: float
    since_s: float
    """When this life first registered at the shard."""

    def is_newer_than(self, other: "LiveWorker") -> bool:
        """Whether of two rows about one worker this one counts."""
        if self.record.incarnation == other.record.incarnation:
            # A shard that was away when the generation rose still lists the old one.
            return self.record.generation > other.record.generation
        return self.since_s > other.since_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCopy:
    """What one shard said last."""

    version: bytes = b""
    rows: tuple[LiveWorker, ...] = ()

    def version_to_ask(self, now_s: float) -> bytes:
        """Return the version with which to ask the shard; empty asks for everything.

        A renewal does not change the version, so a copy in which a lease has run out is good for nothing.
        """
        return self.version if all(row.expires_at_s > now_s for row in self.rows) else b""

    def updated(self, reply: object, asked_at_s: float) -> Self:
        """Return the copy after the shard's reply; leases count from the question, so they never end too late."""
        version, *rows = cast("list[bytes | int]", reply)
        if not rows:
            return self
        return type(self)(version=cast("bytes", version), rows=tuple(_read_rows(rows[1:], asked_at_s)))


def _read_rows(values: list[bytes | int], asked_at_s: float) -> Iterable[LiveWorker]:
    for remaining_ms, age_ms, text in zip(values[::3], values[1::3], values[2::3], strict=True):
        try:
            record = WorkerRecord.from_json(cast("bytes", text))
        except RegistryError as error:
            log.warning("worker.skipped reason=%s", error)
            continue
        yield LiveWorker(
            record=record,
            expires_at_s=asked_at_s + int(remaining_ms) / 1000,
            since_s=asked_at_s - int(age_ms) / 1000,
        )


def merge(copies: Iterable[TableCopy], now_s: float) -> dict[str, LiveWorker]:
    """Return the row that counts of every live worker, by id and in order of id.

    A shard that was away may lack workers or know an earlier life of one; the union, and of two lives the one that
    registered last, is right in both cases.
    """
    youngest: dict[str, LiveWorker] = {}
    for copy in copies:
        for row in copy.rows:
            seen = youngest.get(row.record.worker_id)
            if row.expires_at_s > now_s and (seen is None or row.is_newer_than(seen)):
                youngest[row.record.worker_id] = row
    return dict(sorted(youngest.items()))


def lives(records: Iterable[WorkerRecord]) -> dict[str, str]:
    """Return, by worker id, the life whose claims count."""
    return {record.worker_id: life_of(record.incarnation, record.generation) for record in records}
