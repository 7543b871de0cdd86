from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kv_store.registry.prefix_scan import PrefixScan, growing_batches
from kv_store.registry.protocol import PrefixHits
from messages.handoff import BlockKey

LIVE = {"a": "a1", "b": "b1"}
Rows = Sequence[dict[str, str] | None]


def scan(rows: Rows) -> PrefixHits:
    prefix_scan = PrefixScan(LIVE)
    prefix_scan.advance(rows)
    return prefix_scan.hits()


def leading_blocks(rows: Rows, worker: str) -> int:
    """The rule, said slowly."""
    run = 0
    while run < len(rows) and (rows[run] is None or (rows[run] or {}).get(worker) == LIVE[worker]):
        run += 1
    while run > 0 and rows[run - 1] is None:
        run -= 1
    return run


@given(
    rows=st.lists(
        st.none() | st.fixed_dictionaries({}, optional={"a": st.sampled_from(["a0", "a1"]), "b": st.just("b1")})
    )
)
def test_hits_are_the_leading_blocks_of_each_worker(rows: Rows) -> None:
    expected = {worker: run for worker in LIVE if (run := leading_blocks(rows, worker))}

    assert scan(rows).by_worker == expected


def test_an_unknown_block_continues_a_run() -> None:
    hits = scan([{"a": "a1"}, None, {"a": "a1"}])

    assert hits == PrefixHits(by_worker={"a": 3}, unknown=True)


def test_a_run_does_not_end_on_an_unknown_block() -> None:
    hits = scan([{"a": "a1"}, None, None])

    assert hits == PrefixHits(by_worker={"a": 1}, unknown=True)


def test_unknown_blocks_alone_are_nobodys() -> None:
    hits = scan([None, None])

    assert hits == PrefixHits(by_worker={}, unknown=True)


def test_unknown_blocks_after_everybodys_first_miss_do_not_matter() -> None:
    hits = scan([{"a": "a1"}, {}, None])

    assert hits == PrefixHits(by_worker={"a": 1}, unknown=False)


def test_another_incarnation_is_a_miss() -> None:
    hits = scan([{"a": "a1", "b": "b1"}, {"a": "a0", "b": "b1"}, {"a": "a1", "b": "b1"}])

    assert hits.by_worker == {"a": 1, "b": 3}


def test_claims_of_ended_lives_are_counted_and_a_live_workers_later_blocks_are_not() -> None:
    """Rule 6: another life of a live worker, and a worker that is in the table no more."""
    prefix_scan = PrefixScan(LIVE)

    prefix_scan.advance([{"a": "a1", "b": "b0", "gone": "g1"}, None, {"a": "a1", "b": "b1"}])

    assert prefix_scan.hits().by_worker == {"a": 3}
    assert prefix_scan.num_stale == 2


def test_the_scan_closes_when_nobody_can_extend() -> None:
    prefix_scan = PrefixScan(LIVE)

    prefix_scan.advance([{"a": "a1"}])
    assert prefix_scan.is_open

    prefix_scan.advance([{"b": "b1"}])
    assert not prefix_scan.is_open


def test_batches_double_up_to_a_bound_and_keep_order() -> None:
    keys = [BlockKey(index.to_bytes(4, "little")) for index in range(4000)]

    batches = list(growing_batches(keys))

    assert [len(batch) for batch in batches] == [32, 64, 128, 256, 512, 512, 512, 512, 512, 512, 448]
    assert [key for batch in batches for key in batch] == keys
