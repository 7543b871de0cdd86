import pytest

from deployments.worker.peers import PeerLimits, Peers
from kv_store.layout import Arena, BlockLayout, KvGroup
from kv_store.registry.memory import MemoryRegistry
from kv_store.transfer.loopback import LoopbackNetwork, LoopbackTransport
from messages.errors import HandoffError, LayoutMismatch
from messages.handoff import BlockId, BlockKey, BlockRef, Handoff, HandoffId

LAYOUT = BlockLayout(
    groups=(KvGroup(name="all", layers=(0,), num_kv_heads=1, k_dim=4, v_dim=4),), block_size=16, model_digest="m"
)
HERE = ((BlockId(0), BlockId(1)),)


def offered(fingerprint: str = LAYOUT.fingerprint, num_blocks: int = 2) -> Handoff:
    refs = tuple(BlockRef(block_id=BlockId(n), key=BlockKey(bytes([n]) * 32)) for n in range(num_blocks))
    return Handoff(
        handoff_id=HandoffId("h"),
        worker_id="p",
        incarnation="1",
        address="127.0.0.1:1",
        fingerprint=fingerprint,
        num_tokens=32,
        groups=(refs,),
        lease_s=5.0,
    )


async def test_a_hand_off_of_another_layout_or_size_is_refused_before_its_owner_is_asked() -> None:
    """Rule 13: never another reading of the same bytes."""
    arena = Arena(LAYOUT, (4,))
    transport = LoopbackTransport("d/1", arena.buffer, LoopbackNetwork())
    peers = Peers("d", MemoryRegistry(), transport, arena, PeerLimits(read_deadline_s=1.0))

    with pytest.raises(LayoutMismatch):
        peers.make_reader(offered(fingerprint="another"), HERE)
    with pytest.raises(HandoffError, match="fewer blocks"):
        peers.make_reader(offered(num_blocks=1), HERE)
    assert peers.make_reader(offered(), HERE).is_quiet()

    await peers.close()
