"""Two engines that lend to and borrow from each other at random: invariants after every step, baseline at the end."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.events import Borrowing, Failed, Lent
from engine.request import BorrowTerms, Part
from messages.requests import RequestId
from tests.unit.engine.virtual_bench import BLOCK, Bench, golden, prompt

WINDOW = 6


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 1),  # which engine
        st.integers(1, 30),  # prompt length
        st.integers(0, 2),  # family: prompts of one family share prefixes
        st.integers(1, 6),  # max_tokens
        st.sampled_from([1, 1, 2]),  # choices
        st.sampled_from([Part.WHOLE, Part.WHOLE, Part.PREFILL]),
        st.integers(0, 6),  # steps before the next
    ),
    min_size=1,
    max_size=12,
)


class Pair:
    """Two engines that borrow from each other in an order that chance decides; some reads fail, some come late."""

    def __init__(self, num_blocks: int, window: int | None, seed: int) -> None:
        self.benches = [Bench(num_blocks=num_blocks, window=window) for _ in range(2)]
        self.window = window
        self.chance = random.Random(seed)  # noqa: S311 - reproducible
        self.open: list[tuple[int, Borrowing]] = []
        self.lent: list[tuple[int, Lent, Borrowing]] = []
        self.late: list[tuple[int, str, Lent, Borrowing]] = []
        self.seen = [0, 0]
        self.gone: set[str] = set()
        """Cancelled while something is read for them."""
        self.cancelled: set[str] = set()

    def step(self, number: int) -> bool:
        is_busy = self.benches[number].step()
        for bench in self.benches:
            for group in bench.cache.counts():
                assert group.free + group.cached + group.referenced == group.total
        events = self.benches[number].events
        for event in events[self.seen[number] :]:
            if isinstance(event, Borrowing):
                self.open.append((number, event))
        self.seen[number] = len(events)
        return is_busy

    def move(self) -> bool:
        """Do one thing between the engines, if there is one to do."""
        if self.late and self.chance.random() < 0.3:
            self._land(*self.late.pop(0))
        elif self.open:
            number, event = self.open.pop(self.chance.randrange(len(self.open)))
            self._ask(number, event)
        elif self.lent:
            self._end(*self.lent.pop(self.chance.randrange(len(self.lent))))
        elif self.late:
            self._land(*self.late.pop(0))
        else:
            return False
        return True

    def _ask(self, number: int, event: Borrowing) -> None:
        lent = self.benches[1 - number].lend(f"lend-{number}-{event.request_id}", event.keys, event.cached_tokens // 4)
        if lent.num_tokens:
            self.lent.append((number, lent, event))
        elif event.request_id in self.gone:
            self.benches[number].scheduler.abort(event.request_id)
        else:
            self.benches[number].receive(event.request_id, 0)

    def _end(self, number: int, lent: Lent, event: Borrowing) -> None:
        owner, bench = self.benches[1 - number], self.benches[number]
        if self.chance.random() < 0.25 and event.request_id not in self.gone:
            aside = f"aside-{number}-{event.request_id}"
            bench.scheduler.set_aside(event.request_id, RequestId(aside))
            self.late.append((number, aside, lent, event))
            return
        bench.read(owner, lent, event)
        good = lent.num_tokens
        if self.chance.random() < 0.3:
            good = 0 if self.window is not None else self.chance.randrange(good // BLOCK + 1) * BLOCK
        if event.request_id in self.gone:
            # Cancelled while it was read: the engine hears of it when the read is quiet.
            bench.scheduler.abort(event.request_id)
        else:
            bench.receive(event.request_id, good)
        owner.scheduler.abort(lent.request_id)

    def _land(self, number: int, aside: str, lent: Lent, event: Borrowing) -> None:
        self.benches[number].read(self.benches[1 - number], lent, event)
        self.benches[number].scheduler.abort(RequestId(aside))
        self.benches[1 - number].scheduler.abort(lent.request_id)

    def cancel(self, number: int, name: str) -> None:
        if any(event.request_id == name for _, event in self.open) or any(
            e.request_id == name for _, _, e in self.lent
        ):
            self.gone.add(name)
        else:
            self.benches[number].scheduler.abort(RequestId(name))
        self.cancelled.add(name)


@pytest.mark.parametrize("window", [None, WINDOW])
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS, num_blocks=st.integers(10, 40), seed=st.integers(0, 10**6))
def test_random_lends_and_borrows_end_at_baseline_with_the_right_tokens(
    operations: list[tuple[int, int, int, int, int, Part, int]], num_blocks: int, seed: int, window: int | None
) -> None:
    """Evictions between lookup and lend, aborts in every state, reads that come short, late or never."""
    pair = Pair(num_blocks, window, seed)
    for index, (number, length, family, max_tokens, n, part, steps) in enumerate(operations):
        name = str(index)
        offered = pair.chance.randrange(0, length + BLOCK)
        borrow = BorrowTerms(max_tokens=offered) if pair.chance.random() < 0.7 and offered else None
        pair.benches[number].submit(name, prompt(length, seed=family), max_tokens, part, n=n, borrow=borrow)
        for _ in range(steps):
            pair.step(pair.chance.randrange(2))
            if pair.chance.random() < 0.5:
                pair.move()
        if pair.chance.random() < 0.2:
            pair.cancel(number, name)
    for _ in range(3000):
        busy = [pair.step(0), pair.step(1), pair.move(), release_held(pair)]
        if not any(busy):
            break
    else:
        raise AssertionError("the engines do not come to rest")
    for bench in pair.benches:
        bench.assert_baseline()
    for index, (number, length, family, max_tokens, n, part, _) in enumerate(operations):
        bench = pair.benches[number]
        if str(index) in pair.cancelled or any(event.request_id == str(index) for event in bench.take(Failed)):
            continue
        for choice in range(n):
            name = str(index) if choice == 0 else f"{index}/{choice}"
            expected = golden(prompt(length, seed=family), max_tokens, window, choice)
            assert bench.tokens[name] == expected[: 1 if part is Part.PREFILL else None]


def release_held(pair: Pair) -> bool:
    """Let finished prefills go, as a hand-off does."""
    any_held = False
    for bench in pair.benches:
        held = [name for name in bench.scheduler.request_ids() if name.isdigit() and name in bench.finished_prefills()]
        for name in held:
            bench.scheduler.abort(RequestId(name))
            any_held = True
    return any_held
