"""Several choices of one request share the prompt's blocks and go their own ways; priorities; the preemption fault."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import Allocated, Failed, WorkDone
from engine.request import Part
from messages.errors import InvalidRequest
from messages.requests import RequestId
from messages.tokens import FinishReason, TokenEvent
from tests.unit.engine.virtual_bench import BLOCK, Bench, choose, golden, prompt


@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 30])
@pytest.mark.parametrize("window", [None, 6])
def test_each_choice_gets_the_tokens_it_would_get_alone_from_one_prefill(length: int, window: int | None) -> None:
    bench = Bench(window=window)
    bench.submit("a", prompt(length), max_tokens=9, n=3)

    bench.run()

    for choice in range(3):
        name = "a" if choice == 0 else f"a/{choice}"
        assert bench.tokens[name] == golden(prompt(length), 9, window, choice)
    assert bench.computed_prompt_tokens() == length
    bench.assert_baseline()


def test_choices_share_full_blocks_and_copy_only_the_last_one() -> None:
    bench = Bench()
    bench.submit("a", prompt(18), max_tokens=9, n=4)
    while not bench.tokens:
        bench.step()

    # Four full blocks once, and per choice one for the tail, which has room for the next token.
    assert bench.cache.counts()[0].referenced == 4 + 4


def test_choices_that_find_no_room_wait_and_end_the_same() -> None:
    bench = Bench(num_blocks=6)
    bench.submit("a", prompt(14), max_tokens=8, n=4)

    bench.run()

    for choice in range(4):
        assert bench.tokens["a" if choice == 0 else f"a/{choice}"] == golden(prompt(14), 8, None, choice)
    bench.assert_baseline()


def test_a_request_says_once_what_it_cost_just_before_its_last_token() -> None:
    bench = Bench()
    bench.submit("a", prompt(9), max_tokens=6, n=3)

    bench.run()

    kinds = [type(event) for event in bench.events]
    assert kinds.count(WorkDone) == 1
    assert kinds[-2:] == [WorkDone, TokenEvent]


def test_a_prefill_part_samples_token_1_of_every_choice_and_holds_one_set_of_blocks() -> None:
    bench = Bench()
    bench.submit("p", prompt(10), part=Part.PREFILL, n=3)

    bench.run()

    assert [bench.tokens[name][0] for name in ("p", "p/1", "p/2")] == [
        golden(prompt(10), 1, None, choice)[0] for choice in range(3)
    ]
    assert bench.cache.counts()[0].referenced == 3
    assert [event.is_held for event in bench.take(WorkDone)] == [True]
    bench.scheduler.abort(RequestId("p"))
    bench.assert_baseline()


@pytest.mark.parametrize("received", [0, 4, 9, 10])
@pytest.mark.parametrize("starts_first", [False, True])
@pytest.mark.parametrize("alive", [(0, 1, 2), (1, 2), (2,)])
def test_a_decode_part_carries_on_every_choice_that_is_alive(
    received: int, starts_first: bool, alive: tuple[int, ...]
) -> None:
    bench = Bench()
    expected = {choice: golden(prompt(10), 6, None, choice) for choice in alive}
    bench.submit("d", prompt(10), max_tokens=6, part=Part.DECODE, n=3)
    bench.step()
    (allocated,) = bench.take(Allocated)
    for position, token_id in enumerate(prompt(10)[:received]):
        place, inside = divmod(position, BLOCK)
        bench.model.memory[0, allocated.groups[0][place], inside] = token_id
    commands = [
        lambda: bench.scheduler.receive(RequestId("d"), received),
        lambda: bench.scheduler.start(RequestId("d"), {c: tokens[0] for c, tokens in expected.items()}),
    ]
    for command in reversed(commands) if starts_first else commands:
        command()
    bench.model.copy_blocks(bench.scheduler.take_copies())

    bench.run()

    for choice, tokens in expected.items():
        assert bench.tokens["d" if choice == 0 else f"d/{choice}"] == tokens[1:]
    assert bench.computed_prompt_tokens() == 10 - received
    bench.assert_baseline()


def test_a_choice_that_ends_with_token_1_leaves_the_others_running() -> None:
    # Found by trying: a prompt after which choice 0 samples the end token.
    length = next(n for n in range(1, 400) if golden(prompt(n), 1, None)[0] == 7)
    bench = Bench(num_blocks=256)
    bench.submit("a", prompt(length), max_tokens=5, n=2)

    bench.run()

    assert bench.finished["a"] is FinishReason.STOP
    assert bench.tokens["a/1"] == golden(prompt(length), 5, None, 1)
    bench.assert_baseline()


def test_urgent_requests_are_admitted_first_and_preempted_last() -> None:
    bench = Bench(num_blocks=8, max_running=1)
    bench.submit("running", prompt(4, 1), max_tokens=3)
    bench.step()
    bench.submit("later", prompt(4, 2), max_tokens=3, priority=5)
    bench.submit("first", prompt(4, 3), max_tokens=3, priority=-1)
    bench.submit("second", prompt(4, 4), max_tokens=3)

    bench.run()

    order = [event.request_id for event in bench.take(TokenEvent) if event.first_index == 0]
    assert order == ["running", "first", "second", "later"]


def test_the_fault_point_preempts_each_request_once_and_changes_no_token() -> None:
    bench = Bench(preempts_each_once=True)
    for number in range(5):
        bench.submit(str(number), prompt(6 + number, number), max_tokens=8)

    bench.run()

    assert bench.scheduler.load().counters["preemptions_total"] == sum(
        len(golden(prompt(6 + number, number), 8, None)) > 3 for number in range(5)
    )
    for number in range(5):
        assert bench.tokens[str(number)] == golden(prompt(6 + number, number), 8, None)
    bench.assert_baseline()


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 1), st.integers(1, 8), st.integers(1, 4), st.integers(0, 4)),
        min_size=1,
        max_size=6,
    ),
    num_blocks=st.integers(9, 30),
    window=st.sampled_from([None, 5]),
    once=st.booleans(),
)
def test_any_mix_of_choices_gets_the_models_tokens(
    requests: list[tuple[int, int, int, int, int]], num_blocks: int, window: int | None, once: bool
) -> None:
    bench = Bench(num_blocks=num_blocks, window=window, preempts_each_once=once)
    for number, (length, family, max_tokens, n, steps) in enumerate(requests):
        bench.submit(str(number), prompt(length, family), max_tokens=max_tokens, n=n)
        for _ in range(steps):
            bench.step()

    bench.run()

    for number, (length, family, max_tokens, n, _) in enumerate(requests):
        for choice in range(n):
            name = str(number) if choice == 0 else f"{number}/{choice}"
            assert bench.tokens[name] == golden(prompt(length, family), max_tokens, window, choice)
    bench.assert_baseline()
    assert choose(0, 1) != choose(0, 0)


class BrokenMatcher:
    """Gives up at the third token."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken

    def fill_mask(self, allowed: torch.Tensor) -> None:
        allowed.fill_(1)

    def accept(self, token_id: int) -> None:
        self.taken += 1
        if self.taken == 3:
            raise InvalidRequest(f"the grammar gave up at {token_id}")

    def fork(self) -> "BrokenMatcher":
        return BrokenMatcher(self.taken)


@pytest.mark.parametrize("n", [1, 3])
def test_a_grammar_that_gives_up_ends_its_request_alone(n: int) -> None:
    bench = Bench()
    bench.submit("bad", prompt(6, 1), max_tokens=9, n=n, matcher=BrokenMatcher())
    bench.submit("good", prompt(6, 2), max_tokens=9)

    bench.run()

    (failed,) = bench.take(Failed)
    assert (failed.request_id, type(failed.error)) == ("bad", InvalidRequest)
    assert bench.tokens["good"] == golden(prompt(6, 2), 9, None)
    bench.assert_baseline()
