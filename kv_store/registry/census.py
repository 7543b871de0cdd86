"""Counts what is in the shards, by walking them with a cursor: for people, not for requests."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from kv_store.registry.key_names import Claim, pairs
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.scripts import Command
from kv_store.registry.shard_source import ShardView
from kv_store.registry.sweeper import ServerMemory, read_memory
from kv_store.registry.worker_table import lives

_SCAN_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCensus:
    """What one shard holds of one namespace."""

    shard: str
    """host:port/db."""
    num_blocks: int
    """Blocks that were looked at."""
    claims: Mapping[tuple[str, str], int]
    """By worker id and tier; only those that count."""
    num_dead_claims: int
    """Of lives that have ended; readers ignore them and the clean-up drops them."""
    is_whole: bool
    """Whether every block was looked at, not only the first `max_blocks` of them."""
    memory: ServerMemory | None
    """None when the server may not say."""


async def take_census(
    registry: RedisRegistry, *, max_blocks: int, on_progress: Callable[[str, int], None]
) -> list[ShardCensus | str]:
    """Count the blocks of every shard.

    Args:
        registry: What to count.
        max_blocks: Per shard; a walk that has seen so many ends.
        on_progress: Called with a shard and the number of blocks seen there.

    Returns:
        Per shard its census, or its name alone when it does not answer.

    Raises:
        RegistryError: No shard answers.
    """
    live = lives(await registry.workers())
    view = await registry.source.view()
    return [
        await _count(registry, view, index, live, max_blocks, on_progress) or view.shards[index].name
        for index in range(len(view.shards))
    ]


async def _count(
    registry: RedisRegistry,
    view: ShardView,
    index: int,
    live: Mapping[str, str],
    max_blocks: int,
    on_progress: Callable[[str, int], None],
) -> ShardCensus | None:
    claims: Counter[tuple[str, str]] = Counter()
    cursor = num_blocks = num_dead = 0
    while True:
        scan: Command = ("SCAN", cursor, "MATCH", registry.names.block_pattern, "COUNT", _SCAN_SIZE)
        ((reply,),) = (await registry.source.run("census", view, {index: [scan]})).values()
        if reply is None:
            return None
        next_cursor, found = cast("tuple[bytes, list[bytes]]", reply)
        cursor = int(next_cursor)
        rows = await registry.source.run("census", view, {index: [("HGETALL", name) for name in found]})
        for row in rows[index]:
            num_blocks += 1
            for worker_id, value in pairs(row):
                claim = Claim.read(value)
                if claim is not None and live.get(worker_id.decode()) == claim.life:
                    claims[worker_id.decode(), claim.tier] += 1
                else:
                    num_dead += 1
        on_progress(view.shards[index].name, num_blocks)
        if cursor == 0 or num_blocks >= max_blocks:
            return ShardCensus(
                shard=view.shards[index].name,
                num_blocks=num_blocks,
                claims=dict(claims),
                num_dead_claims=num_dead,
                is_whole=cursor == 0,
                memory=await read_memory(registry.source, view, index),
            )
