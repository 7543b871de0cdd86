"""A claim that did not reach its shard is not found, nor anything behind it, until it has been made again."""

from kv_store.registry.memory import MemoryRegistry
from kv_store.registry.protocol import Claimant
from kv_store.registry.publisher import BlockPublisher, PublishLimits
from kv_store.registry_faults import with_faults
from messages.fault_plan import parse_faults
from messages.faults import Faults
from tests.contract.registry_places import block_keys, worker


async def test_a_prefix_ends_before_the_block_whose_store_failed() -> None:
    """Case 33, rule 7: an error in the store of block 3."""
    now_s = [0.0]
    registry = MemoryRegistry(clock=lambda: now_s[0])
    failing = with_faults(registry, Faults(parse_faults("registry.write:error*1+3")))
    limits = PublishLimits(batch_size=1)
    claimant = Claimant(worker_id="a", incarnation="life-1")
    publisher = BlockPublisher(failing, claimant, limits, lambda: now_s[0])
    publisher.check(await failing.register(worker("a"), lease_s=60.0), publisher.expect(), 60.0)
    keys = block_keys(6)

    publisher.note(keys, ())
    for _ in keys:
        await publisher.flush()
    found = (await registry.lookup(keys)).by_worker
    now_s[0] += limits.retry_s
    while publisher.has_work:
        await publisher.flush()

    assert found == {"a": 3}
    assert (await registry.lookup(keys)).by_worker == {"a": 6}
