from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kv_store.handoff import BlockGroups, HandoffTable
from messages.errors import HandoffError, HandoffStale, HandoffUnknown, LayoutMismatch
from messages.handoff import BlockId, BlockKey, BlockRef, Handoff, HandoffId
from messages.requests import RequestId

ATTEMPTS = count()


def make_table(lease_s: float = 30.0) -> HandoffTable:
    return HandoffTable(worker_id="p", incarnation="life-1", address="host:1", fingerprint="f", lease_s=lease_s)


def refs(*block_ids: int | None) -> tuple[BlockRef | None, ...]:
    return tuple(
        None if number is None else BlockRef(block_id=BlockId(number), key=BlockKey(bytes([number] * 32)))
        for number in block_ids
    )


def grant(table: HandoffTable, request_id: str = "r", now_s: float = 0.0, groups: BlockGroups | None = None) -> Handoff:
    return table.grant(RequestId(request_id), groups or (refs(3, 4, None),), 70, now_s)


def open_(table: HandoffTable, handoff: Handoff, now_s: float = 0.0, **other: object) -> int:
    asked = {
        "attempt_id": f"attempt-{next(ATTEMPTS)}",
        "incarnation": handoff.incarnation,
        "fingerprint": "f",
        "groups": handoff.groups,
        **other,
    }
    return table.open(handoff.handoff_id, now_s=now_s, **asked)  # type: ignore[arg-type]  # built above


def close(table: HandoffTable, handoff: Handoff, generation: int, now_s: float = 0.0) -> bool:
    return table.close(handoff.handoff_id, handoff.incarnation, generation, now_s)


def test_a_handoff_carries_what_its_owner_offers() -> None:
    handoff = grant(make_table())

    assert (handoff.worker_id, handoff.incarnation, handoff.address) == ("p", "life-1", "host:1")
    assert (handoff.fingerprint, handoff.num_tokens, handoff.lease_s) == ("f", 70, 30.0)
    assert handoff.groups == (refs(3, 4, None),)


def test_close_after_open_is_valid_and_frees_once() -> None:
    table = make_table()
    handoff = grant(table)
    generation = open_(table, handoff)

    assert close(table, handoff, generation)

    assert table.pop_freed() == ["r"]
    assert table.pop_freed() == []
    assert not close(table, handoff, generation)
    assert len(table) == 0


def test_close_without_open_is_not_valid() -> None:
    table = make_table()
    handoff = grant(table)

    assert not close(table, handoff, 0)
    assert table.pop_freed() == []


def test_a_second_open_supersedes_the_first() -> None:
    table = make_table()
    handoff = grant(table)
    first = open_(table, handoff)
    second = open_(table, handoff)

    assert second > first
    assert not table.heartbeat(handoff.handoff_id, handoff.incarnation, first, 0.0)
    assert not close(table, handoff, first)
    assert table.pop_freed() == []
    assert close(table, handoff, second)


def test_an_open_that_comes_twice_is_one_attempt() -> None:
    """Rule 5, late messages: a copy of Open changes nothing, and after a later attempt it is refused."""
    table = make_table()
    handoff = grant(table)
    first = open_(table, handoff, attempt_id="a")

    assert open_(table, handoff, attempt_id="a") == first
    assert table.heartbeat(handoff.handoff_id, handoff.incarnation, first, 0.0)

    second = open_(table, handoff, attempt_id="b")
    with pytest.raises(HandoffStale):
        open_(table, handoff, attempt_id="a")
    assert close(table, handoff, second)


def test_late_messages_are_counted_and_good_ones_are_not() -> None:
    table = make_table()
    handoff = grant(table)
    generation = open_(table, handoff)
    table.heartbeat(handoff.handoff_id, handoff.incarnation, generation, 1.0)
    close(table, handoff, generation)
    assert (table.num_late, table.num_extended) == (0, 1)

    close(table, handoff, generation)
    table.heartbeat(handoff.handoff_id, handoff.incarnation, generation, 1.0)
    table.release(handoff.handoff_id, handoff.incarnation, 1.0)
    with pytest.raises(HandoffUnknown):
        open_(table, handoff)

    assert (table.num_late, table.num_extended) == (4, 1)
    assert table.pop_freed() == ["r"]


def test_an_owner_that_withdraws_a_hand_off_frees_it_once_and_is_not_late() -> None:
    table = make_table(lease_s=1.0)
    kept, closed, expired = (grant(table, name) for name in ("kept", "closed", "expired"))
    close(table, closed, open_(table, closed))
    assert table.pop_freed() == ["closed"]

    table.withdraw(kept.handoff_id, 0.5)
    table.withdraw(kept.handoff_id, 0.5)
    table.withdraw(closed.handoff_id, 0.5)
    table.withdraw(expired.handoff_id, 1.5)

    assert table.pop_freed() == ["kept", "expired"]
    assert table.expire(1.5) == ["expired"]
    assert (table.num_late, table.num_granted, len(table)) == (0, 3, 0)


def test_a_read_that_outlives_a_lease_of_50_ms_is_stale() -> None:
    table = make_table(lease_s=0.050)
    handoff = grant(table)
    generation = open_(table, handoff)

    assert not close(table, handoff, generation, now_s=0.100)

    assert table.pop_freed() == ["r"]
    assert table.expire(0.100) == ["r"]
    assert table.expire(0.100) == []


def test_the_sweep_fences_and_frees() -> None:
    table = make_table(lease_s=0.050)
    handoff = grant(table)
    generation = open_(table, handoff)

    assert table.expire(0.049) == []
    assert table.expire(0.051) == ["r"]

    assert table.pop_freed() == ["r"]
    assert not close(table, handoff, generation, now_s=0.052)
    assert not table.heartbeat(handoff.handoff_id, handoff.incarnation, generation, 0.052)
    assert not table.release(handoff.handoff_id, handoff.incarnation, 0.052)
    with pytest.raises(HandoffUnknown):
        open_(table, handoff, now_s=0.052)
    assert table.pop_freed() == []


def test_a_fence_raises_the_generation() -> None:
    table = make_table(lease_s=1.0)
    handoff = grant(table)
    generation = open_(table, handoff)

    table.expire(2.0)

    assert table.generation > generation


def test_after_a_forced_expiry_the_request_can_be_granted_and_read_again() -> None:
    """Case 37."""
    table = make_table(lease_s=0.050)
    grant(table)
    table.expire(1.0)
    table.pop_freed()

    handoff = grant(table, now_s=1.0)
    generation = open_(table, handoff, now_s=1.01)

    assert close(table, handoff, generation, now_s=1.02)


def test_heartbeats_keep_a_lease_alive() -> None:
    table = make_table(lease_s=6.0)
    handoff = grant(table)
    generation = open_(table, handoff)

    for second in range(1, 60):
        assert table.heartbeat(handoff.handoff_id, handoff.incarnation, generation, float(second))

    assert close(table, handoff, generation, now_s=60.0)


def test_release_frees_at_once_in_any_state() -> None:
    """Rule 3: an explicit release, not the lease, frees."""
    table = make_table()
    not_opened, opened = grant(table, "a"), grant(table, "b")
    generation = open_(table, opened)

    assert table.release(not_opened.handoff_id, "life-1", 0.0)
    assert table.release(opened.handoff_id, "life-1", 0.0)

    assert table.pop_freed() == ["a", "b"]
    assert not table.release(opened.handoff_id, "life-1", 0.0)
    assert not close(table, opened, generation)


def test_another_life_of_the_owner_is_stale_everywhere() -> None:
    """Rule 5: incarnation."""
    table = make_table()
    handoff = grant(table)
    generation = open_(table, handoff)

    with pytest.raises(HandoffStale):
        open_(table, handoff, incarnation="life-0")
    assert not table.heartbeat(handoff.handoff_id, "life-0", generation, 0.0)
    assert not table.close(handoff.handoff_id, "life-0", generation, 0.0)
    assert not table.release(handoff.handoff_id, "life-0", 0.0)
    assert table.pop_freed() == []


def test_another_layout_is_refused_at_open() -> None:
    """Rule 13."""
    table = make_table()
    handoff = grant(table)

    with pytest.raises(LayoutMismatch):
        open_(table, handoff, fingerprint="other")
    with pytest.raises(LayoutMismatch):
        open_(table, handoff, groups=(*handoff.groups, refs(1)))


def test_an_unknown_handoff_is_refused_at_open() -> None:
    table = make_table()

    with pytest.raises(HandoffUnknown):
        table.open(HandoffId("x"), attempt_id="d", incarnation="life-1", fingerprint="f", groups=(refs(),), now_s=0.0)


@pytest.mark.parametrize(
    "groups",
    [
        (refs(5, 4, None),),
        (refs(3, 4, 5),),
        (refs(3, 4, None, 6),),
        ((BlockRef(block_id=BlockId(3), key=BlockKey(b"other")), None, None),),
    ],
    ids=["block id", "hole", "beyond the end", "key"],
)
def test_a_block_that_is_not_offered_in_its_place_is_stale(groups: BlockGroups) -> None:
    """Rule 5: block id and key."""
    table = make_table()
    handoff = grant(table)

    with pytest.raises(HandoffStale):
        open_(table, handoff, groups=groups)


def test_a_reader_may_want_a_part() -> None:
    table = make_table()
    handoff = grant(table)

    generation = open_(table, handoff, groups=((None, handoff.groups[0][1], None),))

    assert close(table, handoff, generation)


def test_a_request_has_one_handoff_at_a_time() -> None:
    table = make_table()
    grant(table)

    with pytest.raises(HandoffError):
        grant(table)


class HandoffMachine(RuleBasedStateMachine):
    """Any order of calls: each granted request is freed once, and no Close of a superseded or late read is valid."""

    handoffs = Bundle("handoffs")
    opened = Bundle("opened")

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(lease_s=10.0)
        self.now_s = 0.0
        self.granted: set[str] = set()
        self.freed: list[str] = []
        self.current: dict[str, int] = {}
        self.silent_since_s: dict[str, float] = {}

    @rule(target=handoffs)
    def grant(self) -> Handoff:
        handoff = grant(self.table, f"r{len(self.granted)}", self.now_s)
        self.granted.add(f"r{len(self.granted)}")
        self.silent_since_s[handoff.handoff_id] = self.now_s
        return handoff

    @rule(target=opened, handoff=handoffs)
    def open(self, handoff: Handoff) -> tuple[Handoff, int]:
        try:
            generation = open_(self.table, handoff, self.now_s)
        except HandoffUnknown:
            return handoff, 0
        assert generation > self.current.get(handoff.handoff_id, 0)
        self.current[handoff.handoff_id] = generation
        self.silent_since_s[handoff.handoff_id] = self.now_s
        return handoff, generation

    @rule(read=opened)
    def heartbeat(self, read: tuple[Handoff, int]) -> None:
        handoff, generation = read
        if self.table.heartbeat(handoff.handoff_id, handoff.incarnation, generation, self.now_s):
            assert generation == self.current[handoff.handoff_id]
            self.silent_since_s[handoff.handoff_id] = self.now_s

    @rule(read=opened)
    def close(self, read: tuple[Handoff, int]) -> None:
        handoff, generation = read
        if close(self.table, handoff, generation, self.now_s):
            assert generation == self.current.pop(handoff.handoff_id)
            assert self.now_s < self.silent_since_s[handoff.handoff_id] + 10.0

    @rule(handoff=consumes(handoffs))
    def release(self, handoff: Handoff) -> None:
        self.table.release(handoff.handoff_id, handoff.incarnation, self.now_s)

    @rule(passed_s=st.floats(0.0, 6.0))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def expire(self) -> None:
        self.table.expire(self.now_s)

    @rule()
    def pop(self) -> None:
        self.freed += self.table.pop_freed()

    @invariant()
    def each_request_is_held_or_freed_once(self) -> None:
        assert len(set(self.freed)) == len(self.freed)
        assert len(self.table) + len(self.freed) <= len(self.granted)

    def teardown(self) -> None:
        self.table.expire(self.now_s + 100.0)
        self.freed += self.table.pop_freed()
        assert sorted(self.freed) == sorted(self.granted)
        assert len(self.table) == 0


HandoffMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHandoffMachine = HandoffMachine.TestCase
