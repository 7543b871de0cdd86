"""How much memory of its servers a registry takes per block."""

import secrets
from collections.abc import Sequence

from kv_store.registry.protocol import WorkerRecord
from kv_store.registry.redis import RedisRegistry
from kv_store.registry.sweeper import read_memory
from messages.errors import RegistryError
from messages.handoff import BlockKey

_KEY_BYTES = 32


async def measure_bytes_per_block(registry: RedisRegistry, records: Sequence[WorkerRecord], num_blocks: int) -> float:
    """Publish blocks with one holder each and see what the servers' memory grows by; they are taken back afterwards.

    Args:
        registry: On servers that nobody else uses meanwhile.
        records: The holders, in turn; the length of their ids counts.
        num_blocks: Enough that a table which doubles does not matter: 100,000 or more.

    Returns:
        Bytes per block, over all shards.

    Raises:
        RegistryError: A shard does not say what memory it uses, or did not take every block.
    """
    keys = [BlockKey(secrets.token_bytes(_KEY_BYTES)) for _ in range(num_blocks)]
    shares = [(record, keys[number :: len(records)]) for number, record in enumerate(records)]
    before = await _used_bytes(registry)
    try:
        for record, share in shares:
            await registry.publish(record.worker_id, record.incarnation, share)
        used = await _used_bytes(registry) - before
        if registry.num_silent:
            raise RegistryError("a shard fell silent while it was measured")
    finally:
        for record, share in shares:
            await registry.withdraw(record.worker_id, record.incarnation, share)
    return used / num_blocks


async def _used_bytes(registry: RedisRegistry) -> int:
    view = await registry.source.view()
    memories = [await read_memory(registry.source, view, index) for index in range(len(view.shards))]
    if not memories or any(memory is None for memory in memories):
        raise RegistryError("a shard does not say what memory it uses")
    return sum(memory.used_bytes for memory in memories if memory is not None)
