"""Whatever block of a hand-off is bad, the prefix cache never gives its bytes to anybody (rules 5, 14 and 25)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_store.block_key import block_keys
from kv_store.block_table import BlockTable
from kv_store.handoff import HandoffTable
from kv_store.handoff_local import LocalHandoffOwner
from kv_store.handoff_reader import ArenaGeometry, HandoffReader
from kv_store.layout import BlockLayout, KvGroup
from kv_store.local_cache import LocalCache
from kv_store.transfer.digest import BlockDigester
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kv_store.transfer.protocol import ByteRange
from kv_store.transfer.wrapper import WrappedTransport
from messages.errors import HandoffError, TransferError
from messages.handoff import BlockId, BlockKey, BlockRef
from messages.requests import RequestId

SIZE = 16
NUM_BLOCKS = 24
BLOCK_BYTES = (32, 16)
OFFSETS = (0, NUM_BLOCKS * 32)
ARENA_BYTES = NUM_BLOCKS * 48
ROOT = BlockKey(b"root")
LAYOUT = BlockLayout(
    groups=tuple(KvGroup(name=name, layers=(n,), num_kv_heads=1, k_dim=4, v_dim=4) for n, name in enumerate("ab")),
    block_size=SIZE,
    model_digest="m",
)


@dataclass(frozen=True)
class Accident:
    kind: str
    index: int
    """Logical block."""
    group: int


class AccidentalTransport(WrappedTransport):
    """Spoils one local range: other bytes arrive there, and then the read may fail."""

    def __init__(self, inner: LoopbackTransport, buffer: torch.Tensor, spoilt: tuple[int, int], *, fails: bool) -> None:
        super().__init__(inner)
        self._buffer = buffer
        self._spoilt = spoilt
        self._fails = fails

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        size_bytes = await super().read(agent_name, ranges, deadline_s=deadline_s)
        start, size = self._spoilt
        if any(piece.local_offset <= start < piece.local_offset + piece.size for piece in ranges):
            self._buffer[start : start + size] = 255
            if self._fails:
                raise TransferError("an accident")
        return size_bytes


def fill(buffer: torch.Tensor, group: int, block_id: BlockId, index: int) -> None:
    """The right bytes of logical block `index`."""
    start = OFFSETS[group] + block_id * BLOCK_BYTES[group]
    buffer[start : start + BLOCK_BYTES[group]] = 100 * group + index


def is_right(buffer: torch.Tensor, cache: LocalCache, table: BlockTable, num_tokens: int) -> bool:
    for group, block_ids in enumerate(cache.block_ids(table)):
        for index, block_id in enumerate(block_ids[: -(-num_tokens // SIZE)]):
            assert block_id is not None
            start = OFFSETS[group] + block_id * BLOCK_BYTES[group]
            if not bool((buffer[start : start + BLOCK_BYTES[group]] == 100 * group + index).all()):
                return False
    return True


class Decode:
    """A decode worker's cache and arena; some leading blocks are cached from before."""

    def __init__(self, keys: list[BlockKey], num_cached_blocks: int) -> None:
        self.cache = LocalCache(LAYOUT, (NUM_BLOCKS, NUM_BLOCKS))
        self.arena = torch.full((ARENA_BYTES,), 254, dtype=torch.uint8)
        self.keys = keys
        before = self.table(num_cached_blocks * SIZE, 0)
        self.compute(before, 0, num_cached_blocks * SIZE)
        self.cache.drop(before)

    def table(self, num_tokens: int, cached: int) -> BlockTable:
        table = self.cache.open_table(self.keys, cached)
        self.cache.extend(table, num_tokens)
        return table

    def compute(self, table: BlockTable, start: int, end: int) -> None:
        for group, block_ids in enumerate(self.cache.block_ids(table)):
            for index in range(start // SIZE, -(-end // SIZE)):
                block_id = block_ids[index]
                assert block_id is not None
                fill(self.arena, group, block_id, index)
        self.cache.mark_valid(table, end, self.keys)


async def pull(decode: Decode, table: BlockTable, num_tokens: int, chunk: int, accident: Accident) -> int:
    """Tokens that are good after a hand-off with an accident."""
    cached = table.num_valid
    now_s = 0.0
    network = LoopbackNetwork()
    source = torch.zeros(ARENA_BYTES, dtype=torch.uint8)
    owner_table = HandoffTable(worker_id="p", incarnation="1", address="a", fingerprint="f", lease_s=1.0)
    count = -(-num_tokens // SIZE)
    for group in range(2):
        for index in range(count):
            fill(source, group, BlockId(count - index), index)
    theirs, ours = (BlockDigester(buffer, OFFSETS, BLOCK_BYTES) for buffer in (source, decode.arena))
    owner = LocalHandoffOwner(
        owner_table, LoopbackTransport("p-1", source, network), OFFSETS, lambda: now_s, theirs.digest
    )
    refs = tuple(
        BlockRef(block_id=BlockId(count - i), key=decode.keys[i] if i < len(decode.keys) else None)
        for i in range(count)
    )
    handoff = owner_table.grant(RequestId("r"), (refs, refs), num_tokens, now_s)
    places = decode.cache.block_ids(table)
    local = tuple(tuple(None if i < cached // SIZE else ids[i] for i in range(count)) for ids in places)
    spoilt_id = places[accident.group][min(accident.index, count - 1)]
    assert spoilt_id is not None
    spoilt = (OFFSETS[accident.group] + spoilt_id * BLOCK_BYTES[accident.group], BLOCK_BYTES[accident.group])
    transport = AccidentalTransport(
        LoopbackTransport("d-1", decode.arena, network),
        decode.arena,
        spoilt if accident.kind in ("error", "corrupt") else (-1, 0),
        fails=accident.kind == "error",
    )
    geometry = ArenaGeometry(group_offsets=OFFSETS, block_bytes=BLOCK_BYTES, block_size=SIZE, digest=ours.digest)
    reader = HandoffReader(handoff, owner, transport, geometry, local, 5.0)
    try:
        await reader.open()
        try:
            for complete in [*range(chunk, num_tokens, chunk), num_tokens]:
                await reader.read_through(complete)
        except TransferError:
            pass
        if accident.kind == "lease":
            now_s = 2.0
            source.fill_(253)
        good = (await reader.close()).good_tokens
    except HandoffError:
        good = 0
    await reader.abandon()
    assert owner_table.pop_freed() == ["r"]
    return max(good, cached)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 8 * SIZE),
    st.integers(0, 8),
    st.sampled_from([7, SIZE, 2 * SIZE, 100 * SIZE]),
    st.builds(
        Accident,
        kind=st.sampled_from(["none", "error", "corrupt", "lease"]),
        index=st.integers(0, 7),
        group=st.integers(0, 1),
    ),
)
def test_a_bad_block_is_computed_again_and_never_hit(
    num_tokens: int, num_cached_blocks: int, chunk: int, accident: Accident
) -> None:
    """Cases 20, 32 and 34: the first bad block and all after it are computed, what is hit afterwards is right."""
    tokens = list(range(num_tokens))
    keys = list(block_keys(ROOT, tokens, SIZE))
    decode = Decode(keys, min(num_cached_blocks, len(keys)))
    cached = decode.cache.match(keys, num_tokens)
    table = decode.table(num_tokens, cached)

    good = asyncio.run(pull(decode, table, num_tokens, chunk, accident))
    decode.cache.mark_valid(table, good, keys)

    assert good == num_tokens or good % SIZE == 0
    first_bad = {"none": num_tokens, "lease": 0}.get(
        accident.kind, min(accident.index, (num_tokens - 1) // SIZE) * SIZE
    )
    is_hit_before = first_bad < cached and accident.kind != "lease"
    assert good == num_tokens if is_hit_before or accident.kind == "none" else cached <= good <= max(first_bad, cached)
    assert is_right(decode.arena, decode.cache, table, good)
    hit = decode.cache.match(keys, num_tokens + 1)
    other = decode.table(hit, hit)
    assert is_right(decode.arena, decode.cache, other, hit)
    decode.cache.drop(other)

    decode.compute(table, good, num_tokens)
    assert is_right(decode.arena, decode.cache, table, num_tokens)
    decode.cache.drop(table)
    assert all(group.referenced == 0 for group in decode.cache.counts())
    hit = decode.cache.match(keys, num_tokens + 1)
    assert hit == num_tokens // SIZE * SIZE
    assert is_right(decode.arena, decode.cache, decode.table(hit, hit), hit)
