"""Prefixes that move between two engines: what is lent stays, what is borrowed counts, everything is given back."""

from collections.abc import Sequence

import pytest

from engine.events import Accepted, Borrowing, Failed, Lent
from engine.request import BorrowTerms, Part
from messages.errors import NeedsPrefill
from messages.requests import RequestId
from tests.unit.engine.virtual_bench import BLOCK, Bench, golden, prompt

WINDOW = 6


def terms(max_tokens: int, min_tokens: int = 1) -> BorrowTerms:
    return BorrowTerms(max_tokens=max_tokens, min_tokens=min_tokens)


def warm(bench: Bench, tokens: Sequence[int], name: str = "warm") -> None:
    bench.submit(name, tokens, max_tokens=1)
    bench.run()


def wanted(bench: Bench) -> Borrowing:
    event = bench.take(Borrowing)[-1]
    assert isinstance(event, Borrowing)
    return event


def accepted(bench: Bench) -> Accepted:
    event = bench.take(Accepted)[-1]
    assert isinstance(event, Accepted)
    return event


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 20, 21])
def test_a_borrowed_prefix_is_not_computed_and_gives_the_same_tokens(length: int, window: int | None) -> None:
    owner, bench = Bench(window=window), Bench(window=window)
    warm(owner, prompt(length))
    bench.submit("r", prompt(length), borrow=terms(length))
    bench.step()
    held = (length - 1) // BLOCK * BLOCK
    if held:
        lent = owner.lend("lend", wanted(bench).keys)
        bench.read(owner, lent, wanted(bench))
        bench.receive("r", lent.num_tokens)
    bench.run()

    assert bench.tokens["r"] == golden(prompt(length), 5, window)
    assert accepted(bench).cached_tokens == held
    assert bench.computed_prompt_tokens() == length - held
    assert bench.scheduler.load().counters["prompt_tokens_remote_cache_total"] == held
    owner.scheduler.abort(RequestId("lend"))
    owner.assert_baseline()
    bench.assert_baseline()


def test_others_run_while_a_request_borrows() -> None:
    bench = Bench()
    bench.submit("borrows", prompt(20), borrow=terms(20))
    bench.submit("other", prompt(9, seed=1))
    bench.run()

    assert bench.tokens == {"other": golden(prompt(9, seed=1), 5, None)}
    assert bench.take(Accepted) == [e for e in bench.take(Accepted) if e.request_id == "other"]


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "borrows"), [(20, 1, True), (20, 12, True), (20, 13, False), (8, 1, False)]
)
def test_a_request_borrows_only_what_is_worth_it_over_its_own_hit(
    max_tokens: int, min_tokens: int, borrows: bool
) -> None:
    bench = Bench()
    warm(bench, prompt(9))

    bench.submit("r", prompt(21), borrow=terms(max_tokens, min_tokens))
    bench.step()

    assert bool(bench.take(Borrowing)) == borrows
    if borrows:
        assert wanted(bench).cached_tokens == 8
        assert [block is None for block in wanted(bench).groups[0]] == [True] * 2 + [False] * 3


def test_a_request_that_was_preempted_does_not_borrow() -> None:
    bench = Bench(num_blocks=8)
    warm(bench, prompt(9))
    # At first too little would be gained; when most of its blocks are lost, enough.
    bench.submit("r", prompt(17), max_tokens=8, borrow=terms(16, min_tokens=12))
    bench.step()
    bench.submit("urgent", prompt(9, seed=3), max_tokens=20, priority=-1)
    bench.run()

    assert bench.scheduler.load().counters["preemptions_total"] > 0
    assert bench.take(Borrowing) == []
    assert bench.tokens["r"] == golden(prompt(17), 8, None)


def test_a_prompt_whose_log_probabilities_are_wanted_does_not_borrow() -> None:
    bench = Bench()
    bench.submit("r", prompt(20), borrow=terms(20), prompt_logprobs=0)
    bench.step()

    assert bench.take(Borrowing) == []


def test_what_came_is_hit_by_the_next_and_what_did_not_come_is_not() -> None:
    owner, bench = Bench(), Bench()
    warm(owner, prompt(20))
    bench.submit("r", prompt(20), borrow=terms(20))
    bench.step()
    bench.read(owner, owner.lend("lend", wanted(bench).keys), wanted(bench))

    bench.receive("r", 8)
    bench.submit("next", prompt(20))
    bench.run()

    assert bench.tokens["r"] == bench.tokens["next"] == golden(prompt(20), 5, None)
    assert accepted(bench).cached_tokens == 8


def test_a_request_that_may_not_compute_the_rest_needs_a_prefill() -> None:
    bench = Bench()
    bench.submit("r", prompt(20), borrow=terms(20), max_uncached=4)
    bench.step()

    bench.receive("r", 8)

    (failed,) = bench.take(Failed)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, NeedsPrefill)
    bench.assert_baseline()


def test_a_request_that_borrowing_would_not_help_enough_is_refused_at_once() -> None:
    bench = Bench()
    bench.submit("r", prompt(20), borrow=terms(8), max_uncached=4)
    bench.step()

    assert bench.take(Borrowing) == []
    assert len(bench.take(Failed)) == 1


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_prefill_part_offers_what_it_borrowed(window: int | None) -> None:
    owner, bench, reader = Bench(window=window), Bench(window=window), Bench(window=window)
    warm(owner, prompt(17))
    bench.submit("p", prompt(21), part=Part.PREFILL, borrow=terms(16))
    bench.step()
    assert bench.take(Accepted) == []
    lent = owner.lend("lend", wanted(bench).keys)
    bench.read(owner, lent, wanted(bench))
    bench.receive("p", lent.num_tokens)

    groups = accepted(bench).groups
    bench.run()
    reader.submit("p", prompt(21), part=Part.DECODE)
    reader.step()
    whole = Lent(request_id=RequestId("p"), num_tokens=21, groups=groups or ())
    (allocated,) = reader.take(type(reader.events[-1]))
    reader.read(bench, whole, allocated)
    reader.receive("p", 21)
    reader.scheduler.start(RequestId("p"), {0: bench.tokens["p"][0]})
    reader.run()

    assert bench.tokens["p"] + reader.tokens["p"] == golden(prompt(21), 5, window)
    # A hole at the owner must not look like a block here.
    for length in (9, 13, 17):
        warm(reader, prompt(length), name=f"part{length}")
        assert reader.tokens[f"part{length}"] == golden(prompt(length), 1, window)


def test_a_hole_at_the_owner_of_a_hand_off_is_never_hit_here() -> None:
    """The owner had a hit, and so no block for tokens that no later query of this prompt sees."""
    owner, bench = Bench(window=WINDOW), Bench(window=WINDOW)
    warm(owner, prompt(17))
    owner.submit("p", prompt(21), part=Part.PREFILL)
    owner.run()
    bench.submit("p", prompt(21), part=Part.DECODE)
    bench.step()
    offered = Lent(request_id=RequestId("p"), num_tokens=21, groups=accepted(owner).groups or ())
    bench.read(owner, offered, bench.events[-1])
    bench.receive("p", 21)
    bench.scheduler.start(RequestId("p"), {0: owner.tokens["p"][0]})
    bench.run()

    for length in (5, 9, 13, 17):
        warm(bench, prompt(length), name=f"part{length}")

    assert [bench.tokens[f"part{length}"] for length in (5, 9, 13, 17)] == [
        golden(prompt(length), 1, WINDOW) for length in (5, 9, 13, 17)
    ]


@pytest.mark.parametrize("cut", [4, 8, 12, 16, 20])
def test_a_hand_off_that_came_short_in_a_model_with_windows_is_computed(cut: int) -> None:
    """The owner had a hit, and so holes, where a query behind the cut would look."""
    owner, bench = Bench(window=WINDOW), Bench(window=WINDOW)
    warm(owner, prompt(17))
    owner.submit("p", prompt(21), part=Part.PREFILL)
    owner.run()
    groups = accepted(owner).groups or ()
    bench.submit("p", prompt(21), part=Part.DECODE)
    bench.step()
    bench.read(owner, Lent(request_id=RequestId("p"), num_tokens=21, groups=groups), bench.events[-1])

    bench.receive("p", cut)
    bench.scheduler.start(RequestId("p"), {0: owner.tokens["p"][0]})
    bench.run()

    assert owner.tokens["p"] + bench.tokens["p"] == golden(prompt(21), 5, WINDOW)


def test_what_is_lent_is_not_evicted_before_it_is_ended() -> None:
    owner = Bench(num_blocks=8)
    warm(owner, prompt(16))
    keys = lent_keys(owner, prompt(16))
    lent = owner.lend("lend", keys)
    before = dict(owner.model.memory)

    for seed in range(1, 6):
        warm(owner, prompt(14, seed=seed), name=f"other{seed}")

    assert lent.num_tokens == 16
    assert all(
        owner.model.memory[0, ref.block_id, inside] == before[0, ref.block_id, inside]
        for ref in lent.groups[0]
        if ref is not None
        for inside in range(BLOCK)
    )
    assert owner.scheduler.load().held == 1
    assert owner.scheduler.abort(RequestId("lend"))
    assert not owner.scheduler.abort(RequestId("lend"))
    owner.assert_baseline()


def test_nothing_is_lent_that_the_reader_has() -> None:
    owner = Bench()
    warm(owner, prompt(16))
    keys = lent_keys(owner, prompt(16))

    assert owner.lend("none", keys, first_block=4).num_tokens == 0
    lent = owner.lend("some", keys, first_block=3)

    assert [ref is None for ref in lent.groups[0]] == [True, True, True, False]
    owner.scheduler.abort(RequestId("some"))
    owner.assert_baseline()


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_request_whose_blocks_may_still_be_written_goes_on_with_others(window: int | None) -> None:
    """Rule 1: late bytes land where nobody looks."""
    bench = Bench(window=window)
    bench.submit("r", prompt(20), borrow=terms(20))
    bench.step()
    places = [(group, block) for group, blocks in enumerate(wanted(bench).groups) for block in blocks]

    bench.scheduler.set_aside(RequestId("r"), RequestId("aside"))
    for _ in range(40):
        for group, block in places:
            for inside in range(BLOCK):
                bench.model.memory[group, block or 0, inside] = 999
        if not bench.step():
            break

    assert bench.tokens["r"] == golden(prompt(20), 5, window)
    assert accepted(bench).cached_tokens == 0
    assert bench.scheduler.load().held == 1
    bench.scheduler.abort(RequestId("aside"))
    bench.assert_baseline()


def lent_keys(bench: Bench, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Keys of a prompt's full blocks."""
    other = Bench()
    other.submit("r", [*tokens, 1], borrow=terms(len(tokens)))
    other.step()
    return wanted(other).keys
