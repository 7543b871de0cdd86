from benchmarks.bare_registry import BareCommands
from kv_store.registry.connection import shard_name
from kv_store.registry.prefix_scan import growing_batches
from kv_store.registry.protocol import Claimant
from kv_store.sharding import RendezvousSharding
from messages.handoff import BlockKey

URLS = ["redis://127.0.0.1:7001/0", "redis://127.0.0.1:7002/0"]
KEYS = [BlockKey(bytes([number // 256, number % 256]) * 16) for number in range(700)]
CLAIMANT = Claimant(worker_id="w", incarnation="i")


def blocks_of(commands: list[tuple[str | bytes | int, ...]], *, at: int) -> list[BlockKey]:
    names = [words[at] for words in commands if str(words[at]).find("/b/") > 0]
    return [BlockKey(name.removeprefix(b"kvferry/n/b/")) for name in names if isinstance(name, bytes)]


def test_lookups_go_out_in_the_batches_of_the_registry() -> None:
    batches = BareCommands(URLS, "n").lookup(KEYS, [b"1", b"2"])

    sizes = [sum(len(blocks_of(list(commands), at=1)) for commands in batch.values()) for batch in batches]
    assert sizes == [len(batch) for batch in growing_batches(KEYS)]


def test_only_the_first_batch_asks_every_shard_for_the_worker_table() -> None:
    first, *others = BareCommands(URLS, "n").lookup(KEYS, [b"1", b"2"])

    assert [first[shard][-1][3:] for shard in (0, 1)] == [(b"kvferry/n/w", b"1"), (b"kvferry/n/w", b"2")]
    assert {words[0] for batch in others for commands in batch.values() for words in commands} == {"HGETALL"}


def test_blocks_are_published_where_the_registry_looks_for_them_and_numbered_last() -> None:
    sharding = RendezvousSharding([shard_name(url) for url in URLS])

    batch = BareCommands(URLS, "n").publish(CLAIMANT, KEYS[:64], 5)

    assert {shard: blocks_of(list(commands), at=3) for shard, commands in batch.items()} == {
        shard: [KEYS[position] for position in positions] for shard, positions in sharding.split(KEYS[:64]).items()
    }
    assert all(commands[-1][3:7] == (b"kvferry/n/m", "w", "i", 5) for commands in batch.values())
