"""What the `kvferry kv` commands print: one answer, as a table for people or as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from deployments.cli.console import output
from kv_store.registry.census import ShardCensus
from kv_store.registry.protocol import PrefixHits, WorkerRecord
from kv_store.registry.worker_table import LiveWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The same in both forms."""

    data: object
    """For JSON."""
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()


def print_answer(answer: Answer, *, as_json: bool) -> None:
    """Print an answer on stdout."""
    if as_json:
        output.print(json.dumps(answer.data, indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    for table in answer.tables:
        output.print(table)
    for note in answer.notes:
        output.print(note, markup=False, highlight=False, soft_wrap=True)


def workers_answer(rows: Sequence[LiveWorker], now_s: float) -> Answer:
    """The worker table, with the seconds that each lease has left."""
    table = _table("worker", "pool", "role", "address", "incarnation", "generation", "lease left")
    data = []
    for row in rows:
        record, left_s = row.record, max(0.0, row.expires_at_s - now_s)
        table.add_row(
            record.worker_id,
            record.pool,
            record.role,
            record.address,
            record.incarnation[:12],
            str(record.generation),
            f"{left_s:.1f} s",
        )
        data.append(
            {
                "worker_id": record.worker_id,
                "pool": record.pool,
                "role": record.role,
                "model": record.model,
                "address": record.address,
                "incarnation": record.incarnation,
                "generation": record.generation,
                "lease_left_s": round(left_s, 3),
            }
        )
    return Answer(data={"workers": data}, tables=(table,), notes=() if data else ("no worker is registered",))


def stats_answer(censuses: Sequence[ShardCensus | str]) -> Answer:
    """Blocks by worker, tier and shard, and what the shards' memory holds."""
    shards = _table("shard", "blocks", "dead claims", "memory", "limit", "when full")
    claims = _table("worker", "tier", "shard", "blocks")
    data: list[dict[str, object]] = []
    notes = []
    for census in censuses:
        if isinstance(census, str):
            shards.add_row(census, "does not answer", "", "", "", "")
            data.append({"shard": census, "answers": False})
            continue
        memory = census.memory
        about = "" if census.is_whole else "at least "
        shards.add_row(
            census.shard,
            f"{about}{census.num_blocks:,}",
            f"{census.num_dead_claims:,}",
            "?" if memory is None else _mib(memory.used_bytes),
            "?" if memory is None else (_mib(memory.max_bytes) if memory.max_bytes else "none"),
            "?" if memory is None else memory.policy,
        )
        for (worker_id, tier), count in sorted(census.claims.items()):
            claims.add_row(worker_id, tier, census.shard, f"{count:,}")
        if memory is not None and memory.may_evict:
            notes.append(f"{census.shard} may drop entries when it is full: set maxmemory-policy to noeviction")
        data.append(_census_data(census))
    return Answer(data={"shards": data}, tables=(shards, claims), notes=tuple(notes))


def prefix_answer(num_tokens: int, lookups: Sequence[tuple[WorkerRecord, int, PrefixHits]]) -> Answer:
    """Who holds how much of a prompt.

    Args:
        num_tokens: Of the prompt.
        lookups: Per key identity in use: a worker that has it, the prompt's full blocks, and the hits.
    """
    table = _table("worker", "blocks", "tokens")
    holders: list[dict[str, object]] = []
    for record, _, hits in lookups:
        for worker_id, blocks in sorted(hits.by_worker.items(), key=lambda item: -item[1]):
            table.add_row(worker_id, f"{blocks:,}", f"{blocks * record.block_size:,}")
            holders.append({"worker_id": worker_id, "blocks": blocks, "tokens": blocks * record.block_size})
    num_blocks = max(full for _, full, _ in lookups)
    is_unknown = any(hits.unknown for _, _, hits in lookups)
    notes = [f"the prompt has {num_tokens:,} tokens, {num_blocks:,} full blocks"]
    if not holders:
        notes.append("nobody holds a block of it")
    if is_unknown:
        notes.append("a shard does not answer: some of it may be held and not shown")
    data = {"tokens": num_tokens, "blocks": num_blocks, "unknown": is_unknown, "holders": holders}
    return Answer(data=data, tables=(table,) if holders else (), notes=tuple(notes))


def clear_answer(cleared: Mapping[str, int | str]) -> Answer:
    """Blocks that each worker forgot, or why it did not."""
    table = _table("worker", "blocks cleared")
    for worker_id, count in cleared.items():
        table.add_row(worker_id, f"{count:,}" if isinstance(count, int) else count)
    data = [
        {"worker_id": worker_id, "blocks_cleared": count}
        if isinstance(count, int)
        else {"worker_id": worker_id, "error": count}
        for worker_id, count in cleared.items()
    ]
    return Answer(data={"workers": data}, tables=(table,))


def _census_data(census: ShardCensus) -> dict[str, object]:
    memory = census.memory
    return {
        "shard": census.shard,
        "answers": True,
        "blocks": census.num_blocks,
        "is_whole": census.is_whole,
        "dead_claims": census.num_dead_claims,
        "used_bytes": None if memory is None else memory.used_bytes,
        "max_bytes": None if memory is None else memory.max_bytes,
        "policy": None if memory is None else memory.policy,
        "claims": [
            {"worker_id": worker_id, "tier": tier, "blocks": count}
            for (worker_id, tier), count in sorted(census.claims.items())
        ],
    }


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**2:,.1f} MiB"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
