from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pools import PoolSpec
from cluster.reuse import GroupBytes, ReuseRules, WorkerRates
from cluster.snapshot import Snapshot, WorkerFacts, WorkerLoad
from cluster.step_time import ASSUMED, StepTimes
from messages.reservations import Admitted

POOLS = (PoolSpec(name="prefill", role="prefill"), PoolSpec(name="decode", role="decode"))
TIMES = StepTimes(base_ms=10.0, prefill_token_ms=1.0, decode_token_ms=2.0, context_token_ms=0.01)


def facts(worker_id: str, pool: str = "decode", **fields: object) -> WorkerFacts:
    return WorkerFacts(**({"worker_id": worker_id, "incarnation": "i1", "pool": pool} | fields))


def test_a_heartbeat_writes_the_row_of_its_worker_alone() -> None:
    snapshot = Snapshot(POOLS)
    snapshot.update(facts("a"), WorkerLoad(free_tokens=100, running=1))
    snapshot.update(facts("b"), WorkerLoad(free_tokens=200, running=2))

    snapshot.update(facts("a"), WorkerLoad(free_tokens=50, running=3))

    assert snapshot.worker_ids == ["a", "b"]
    assert snapshot.columns.free_tokens.tolist() == [50, 200]
    assert snapshot.columns.running.tolist() == [3, 2]


def test_roles_come_from_the_pool() -> None:
    snapshot = Snapshot(POOLS)
    snapshot.update(facts("a"), WorkerLoad())
    snapshot.update(facts("b", "prefill"), WorkerLoad())

    assert snapshot.columns.can_decode.tolist() == [True, False]
    assert snapshot.columns.can_prefill.tolist() == [False, True]


def test_a_worker_of_an_unknown_pool_does_not_join() -> None:
    snapshot = Snapshot(POOLS)

    assert snapshot.update(facts("a", "another"), WorkerLoad()) is None
    assert len(snapshot) == 0


def test_a_new_life_of_a_worker_takes_its_row() -> None:
    snapshot = Snapshot(POOLS)
    snapshot.update(facts("a"), WorkerLoad(admitted=(Admitted(issuer="x", through=3),)))
    snapshot.update(facts("a", incarnation="i2"), WorkerLoad())

    assert (snapshot.incarnations, snapshot.admitted) == (["i2"], [()])


def test_the_outlook_of_a_queue_counts_the_decodes_that_share_its_steps() -> None:
    """100 queued tokens in chunks of 8 beside 2 decodes: 12.5 steps of 10 + 2 * 2 + 0.01 * 300 ms, and the tokens."""
    snapshot = Snapshot(POOLS)
    load = WorkerLoad(queued_prefill_tokens=100, running=1, waiting=1, context_tokens=300, times=TIMES)

    snapshot.update(facts("a", step_tokens=10), load)

    columns = snapshot.columns
    assert columns.step_ms[0] == pytest.approx(17.0)
    # On average 50 tokens of the prompt are there when a chunk of it attends to them.
    assert columns.queue_work_ms[0] == pytest.approx(100 * 1.0 + 12.5 * 0.01 * 50)
    assert columns.queue_ms[0] == pytest.approx(columns.queue_work_ms[0] + 12.5 * 17.0)
    assert columns.queued_token_ms[0] * 100 == pytest.approx(columns.queue_ms[0])


def test_tokens_queued_in_several_prompts_attend_to_less() -> None:
    snapshot = Snapshot(POOLS)
    for worker_id, waiting in (("a", 1), ("b", 4)):
        load = WorkerLoad(queued_prefill_tokens=1000, waiting=waiting, times=TIMES)
        snapshot.update(facts(worker_id, "prefill", step_tokens=100), load)

    # 10 steps, each of 0.01 ms for every token of half a prompt.
    one, four = (snapshot.columns.queue_work_ms - 1000).tolist()
    assert (one, four) == pytest.approx((10 * 0.01 * 500, 10 * 0.01 * 125))


def test_a_prompt_that_is_on_its_way_counts_until_the_next_heartbeat() -> None:
    snapshot = Snapshot(POOLS)
    load = WorkerLoad(queued_prefill_tokens=100, running=2, times=replace(TIMES, context_token_ms=0.0))
    snapshot.update(facts("a"), load)
    before = outlook(snapshot, 0)

    snapshot.note_prefill(0, 100)

    assert outlook(snapshot, 0) == pytest.approx([2 * each for each in before])
    assert (snapshot.columns.waiting[0], snapshot.columns.decoding[0]) == (1, 3)
    snapshot.update(facts("a"), load)
    assert outlook(snapshot, 0) == before


def outlook(snapshot: Snapshot, row: int) -> list[float]:
    columns = snapshot.columns
    all_of_it = (columns.queued_prefill_tokens, columns.queue_steps, columns.queue_ms, columns.queue_work_ms)
    return [float(column[row]) for column in all_of_it]


def test_a_prefill_worker_decodes_nothing_whatever_runs_there() -> None:
    snapshot = Snapshot(POOLS)

    load = WorkerLoad(running=9, waiting=9, context_tokens=9000, times=TIMES)
    snapshot.update(facts("a", "prefill", chunk_tokens=64), load)

    columns = snapshot.columns
    assert (columns.decoding[0], columns.chunk_tokens[0], columns.step_ms[0]) == (0, 64, 10.0)


def test_a_worker_that_has_made_no_steps_is_taken_for_one_like_its_pool() -> None:
    """Otherwise a new worker of a slow pool would seem to be the fastest."""
    snapshot = Snapshot(POOLS)
    snapshot.update(facts("a"), WorkerLoad())
    snapshot.update(facts("b"), WorkerLoad(times=TIMES))
    snapshot.update(facts("c"), WorkerLoad())
    snapshot.update(facts("d", "prefill"), WorkerLoad())

    assert snapshot.columns.step_ms.tolist() == [ASSUMED.base_ms, 10.0, 10.0, ASSUMED.base_ms]


def test_rates_that_are_not_measured_are_assumed() -> None:
    snapshot = Snapshot(POOLS, ReuseRules(assumed_prefill_tokens_s=7.0, assumed_transfer_bytes_s=9.0))
    snapshot.update(facts("a"), WorkerLoad())
    snapshot.update(facts("b"), WorkerLoad(rates=WorkerRates(prefill_tokens_s=3.0, transfer_bytes_s=4.0)))

    assert snapshot.columns.prefill_tokens_s.tolist() == [7.0, 3.0]
    assert snapshot.columns.transfer_bytes_s.tolist() == [9.0, 4.0]


def test_bytes_are_those_of_each_row_s_layout() -> None:
    snapshot = Snapshot(POOLS)
    windowed = (GroupBytes(token_bytes=10), GroupBytes(token_bytes=100, window=5))
    snapshot.update(facts("a", fingerprint="x"), WorkerLoad(rates=WorkerRates(groups=windowed)))
    snapshot.update(facts("b", fingerprint="y"), WorkerLoad(rates=WorkerRates(groups=(GroupBytes(token_bytes=1),))))

    sizes = snapshot.bytes_between(np.array([20.0, 20.0]))

    assert sizes.tolist() == [WorkerRates(groups=windowed).bytes_between(0, 20), 20.0]


def test_a_worker_that_does_not_say_how_large_its_blocks_are_is_like_others_with_its_layout() -> None:
    snapshot = Snapshot(POOLS)
    snapshot.update(facts("a"), WorkerLoad(rates=WorkerRates(groups=(GroupBytes(token_bytes=7),))))
    snapshot.update(facts("b"), WorkerLoad())

    assert snapshot.bytes_between(np.array([1.0, 1.0])).tolist() == [7.0, 7.0]


def test_a_worker_that_joins_has_had_no_turn() -> None:
    snapshot = Snapshot(POOLS)
    snapshot.update(facts("a"), WorkerLoad())
    snapshot.note_choice(0)
    snapshot.remove("a")

    snapshot.update(facts("b"), WorkerLoad())

    assert snapshot.columns.last_turn.tolist() == [0]


def test_layouts_that_nobody_has_any_more_leave_no_trace() -> None:
    snapshot = Snapshot(POOLS)
    for number in range(50):
        snapshot.update(facts("a", fingerprint=f"version-{number}"), WorkerLoad())
        snapshot.remove("a")

    assert len(snapshot.layouts) == 1


def test_matched_tokens_and_exclusions_go_by_worker_id() -> None:
    snapshot = Snapshot(POOLS)
    for worker_id in "abc":
        snapshot.update(facts(worker_id), WorkerLoad())

    assert snapshot.matched_tokens({"b": 64, "gone": 99}).tolist() == [0, 64, 0]
    assert snapshot.all_but({"c", "gone"}).tolist() == [True, True, False]


@given(st.lists(st.tuples(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), st.integers(0, 3)), max_size=120))
def test_rows_stay_those_of_their_workers_through_joins_and_leaves(changes: list[tuple[str, int]]) -> None:
    snapshot = Snapshot(POOLS)
    expected: dict[str, int] = {}
    for number, (worker_id, kind) in enumerate(changes):
        if kind == 0:
            snapshot.remove(worker_id)
            expected.pop(worker_id, None)
        else:
            snapshot.update(facts(worker_id, incarnation=f"i{number}"), WorkerLoad(free_tokens=number))
            expected[worker_id] = number

    found = dict(zip(snapshot.worker_ids, snapshot.columns.free_tokens.tolist(), strict=True))
    assert found == expected
    assert all(snapshot.row_of(worker_id) == row for row, worker_id in enumerate(snapshot.worker_ids))
    assert snapshot.incarnations == [f"i{expected[worker_id]}" for worker_id in snapshot.worker_ids]
