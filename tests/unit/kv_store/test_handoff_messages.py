"""Hand-off messages in any order, late and twice, against a plain model of who owns which bytes (rules 1 to 5)."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, invariant, multiple, rule

from kv_store.handoff import HandoffTable
from messages.errors import HandoffError
from messages.handoff import BlockId, BlockKey, BlockRef, Handoff
from messages.requests import RequestId

NUM_BLOCKS = 4
BLOCKS_PER_REQUEST = 2
LEASE_S = 6.0


@dataclass(eq=False)
class Attempt:
    """One reader of one hand-off, and what it has copied so far: the owner of the bytes, by block."""

    handoff: Handoff
    attempt_id: str
    generation: int = 0
    copied: dict[int, str] = field(default_factory=dict)
    has_sent_close: bool = False
    num_valid_closes: int = 0


class MessageMachine(RuleBasedStateMachine):
    """Blocks are taken again as soon as the table lets them go; a valid Close vouches for what was copied before."""

    handoffs = Bundle("handoffs")
    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.table = HandoffTable(worker_id="p", incarnation="1", address="a", fingerprint="f", lease_s=LEASE_S)
        self.now_s = 0.0
        self.free = list(range(NUM_BLOCKS))
        self.bytes_of: dict[int, str] = {}
        self.held: dict[str, list[int]] = {}
        self.num_granted = 0
        self.num_attempts = 0
        self.latest: dict[str, Attempt] = {}

    @rule(target=handoffs)
    def grant(self) -> Handoff | MultipleResults[Handoff]:
        if len(self.free) < BLOCKS_PER_REQUEST:
            return multiple()
        owner = f"r{self.num_granted}"
        self.num_granted += 1
        taken = [self.free.pop(0) for _ in range(BLOCKS_PER_REQUEST)]
        self.held[owner] = taken
        self.bytes_of |= dict.fromkeys(taken, owner)
        group = tuple(BlockRef(block_id=BlockId(block), key=BlockKey(owner.encode())) for block in taken)
        return self.table.grant(RequestId(owner), (group,), 16 * BLOCKS_PER_REQUEST, self.now_s)

    @rule(target=attempts, handoff=handoffs)
    def begin(self, handoff: Handoff) -> Attempt:
        self.num_attempts += 1
        return Attempt(handoff, f"attempt-{self.num_attempts}")

    @rule(attempt=attempts)
    def deliver_open(self, attempt: Attempt) -> None:
        handoff = attempt.handoff
        try:
            generation = self.table.open(
                handoff.handoff_id,
                attempt_id=attempt.attempt_id,
                incarnation=handoff.incarnation,
                fingerprint=handoff.fingerprint,
                groups=handoff.groups,
                now_s=self.now_s,
            )
        except HandoffError:
            return
        assert attempt.generation in (0, generation), "a copy of an Open is not a new attempt"
        if not attempt.generation:
            before = self.latest.get(handoff.handoff_id)
            assert before is None or before.generation < generation
            self.latest[handoff.handoff_id] = attempt
        assert self.latest[handoff.handoff_id] is attempt, "an attempt that was replaced does not come back"
        attempt.generation = generation

    @rule(attempt=attempts, places=st.sampled_from([(0,), (1,), (0, 1)]))
    def copy(self, attempt: Attempt, places: tuple[int, ...]) -> None:
        """One-sided: nobody asks the table."""
        if not attempt.generation or attempt.has_sent_close:
            return
        for place in places:
            ref = attempt.handoff.groups[0][place]
            assert ref is not None
            attempt.copied.setdefault(place, self.bytes_of[ref.block_id])

    @rule(attempt=attempts)
    def deliver_close(self, attempt: Attempt) -> None:
        if len(attempt.copied) < BLOCKS_PER_REQUEST:
            return
        attempt.has_sent_close = True
        handoff = attempt.handoff
        if self.table.close(handoff.handoff_id, handoff.incarnation, attempt.generation, self.now_s):
            attempt.num_valid_closes += 1
            (ref, *_) = handoff.groups[0]
            assert ref is not None
            assert ref.key is not None
            assert set(attempt.copied.values()) == {ref.key.decode()}, "valid, yet bytes of another owner"
            assert attempt.num_valid_closes == 1
            assert self.latest[handoff.handoff_id] is attempt

    @rule(attempt=attempts)
    def deliver_heartbeat(self, attempt: Attempt) -> None:
        if not attempt.generation:
            return
        handoff = attempt.handoff
        if self.table.heartbeat(handoff.handoff_id, handoff.incarnation, attempt.generation, self.now_s):
            assert self.latest[handoff.handoff_id] is attempt
            assert attempt.num_valid_closes == 0

    @rule(handoff=handoffs)
    def deliver_release(self, handoff: Handoff) -> None:
        self.table.release(handoff.handoff_id, handoff.incarnation, self.now_s)

    @rule(passed_s=st.sampled_from([0.25, LEASE_S / 6, LEASE_S * 2 / 3]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def sweep(self) -> None:
        self.table.expire(self.now_s)

    @invariant()
    def what_is_let_go_may_be_taken_again_at_once(self) -> None:
        for request_id in self.table.pop_freed():
            self.free += self.held.pop(request_id)
        assert len(self.table) == len(self.held)
        assert len(self.free) == len(set(self.free)) == NUM_BLOCKS - BLOCKS_PER_REQUEST * len(self.held)

    def teardown(self) -> None:
        self.table.expire(self.now_s + 10 * LEASE_S)
        self.what_is_let_go_may_be_taken_again_at_once()
        assert not self.held


MessageMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestMessageMachine = MessageMachine.TestCase
