"""How many ranges a hand-off of 6,000 tokens is read in, when the block ids come from real allocators."""

import random

import pytest
import torch

from kv_store.block_key import block_keys
from kv_store.handoff import HandoffTable
from kv_store.handoff_local import LocalHandoffOwner
from kv_store.handoff_reader import ArenaGeometry, HandoffReader
from kv_store.layout import BlockLayout, KvGroup
from kv_store.local_cache import LocalCache
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from messages.handoff import BlockId, BlockKey, BlockRef
from messages.requests import RequestId
from tests.unit.kv_store.handoff_pair import RecordingTransport

SIZE = 32
NUM_BLOCKS = 1000
NUM_TOKENS = 6000
BLOCK_BYTES = 8
GEOMETRY = ArenaGeometry(group_offsets=(0,), block_bytes=(BLOCK_BYTES,), block_size=SIZE)
LAYOUT = BlockLayout(
    groups=(KvGroup(name="all", layers=(0,), num_kv_heads=1, k_dim=4, v_dim=4),), block_size=SIZE, model_digest="m"
)


def ids_after(num_prompts: int, seed: int) -> tuple[BlockId, ...]:
    """Blocks of the next 6,000 tokens on a worker that has served so many prompts of 100 to 6,000 tokens."""
    cache = LocalCache(LAYOUT, (NUM_BLOCKS,))
    source = random.Random(seed)  # noqa: S311 - prompts, no secrets
    for _ in range(num_prompts):
        tokens = [source.randrange(10**6) for _ in range(source.randrange(100, NUM_TOKENS))]
        keys = list(block_keys(BlockKey(b"root"), tokens, SIZE))
        table = cache.open_table(keys, 0)
        cache.extend(table, len(tokens))
        cache.mark_valid(table, len(tokens), keys)
        cache.drop(table)
    table = cache.open_table([], 0)
    cache.extend(table, NUM_TOKENS)
    return tuple(block_id for block_id in cache.block_ids(table)[0] if block_id is not None)


# Measured: 1, 5 and 17 ranges for 188 blocks.
@pytest.mark.parametrize(("num_prompts", "most"), [(0, 1), (50, 12), (200, 40)])
async def test_a_long_handoff_is_read_in_few_ranges(num_prompts: int, most: int) -> None:
    network = LoopbackNetwork()
    source, local = (torch.zeros(NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8) for _ in range(2))
    table = HandoffTable(worker_id="p", incarnation="1", address="a", fingerprint="f")
    owner = LocalHandoffOwner(table, LoopbackTransport("p-1", source, network), (0,), lambda: 0.0)
    transport = RecordingTransport("d-1", local, network)
    refs = tuple(BlockRef(block_id=block_id, key=None) for block_id in ids_after(num_prompts, seed=1))
    handoff = table.grant(RequestId("r"), (refs,), NUM_TOKENS, 0.0)
    reader = HandoffReader(handoff, owner, transport, GEOMETRY, (ids_after(num_prompts, seed=2),), 5.0)

    await reader.open()
    await reader.read_through(NUM_TOKENS)
    stats = await reader.close()

    assert stats.blocks == 188
    assert len(transport.reads[0]) <= most
