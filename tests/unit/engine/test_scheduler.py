"""The scheduler against a virtual model whose KV is the token itself, so that a wrong block is seen at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import Accepted, Allocated, Failed, Progress
from engine.request import Part
from messages.errors import InvalidRequest, NeedsPrefill, Overloaded
from messages.requests import RequestId
from messages.tokens import FinishReason
from tests.unit.engine.virtual_bench import BLOCK, Bench, golden, prompt


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17, 40])
def test_a_request_alone_gets_the_models_tokens(length: int) -> None:
    bench = Bench()
    bench.submit("a", prompt(length), max_tokens=6)

    bench.run()

    assert bench.tokens["a"] == golden(prompt(length), 6, None)
    bench.assert_baseline()


def test_a_repeated_prompt_is_not_computed_again() -> None:
    bench = Bench()
    bench.submit("a", prompt(19))
    bench.run()
    computed = sum(batch.num_tokens for batch in bench.batches)

    bench.submit("b", prompt(19))
    bench.run()

    again = sum(batch.num_tokens for batch in bench.batches) - computed
    assert again == computed - 16
    assert [event.cached_tokens for event in bench.take(Accepted)] == [0, 16]
    assert bench.tokens["b"] == bench.tokens["a"]


def test_a_full_hit_still_computes_a_token() -> None:
    bench = Bench()
    bench.submit("a", prompt(16))
    bench.run()

    bench.submit("b", prompt(16))
    bench.run()

    assert bench.take(Accepted)[-1].cached_tokens == 12
    assert bench.tokens["b"] == golden(prompt(16), 5, None)


def test_decodes_go_before_a_long_prompt_in_every_step() -> None:
    bench = Bench(num_blocks=128)
    bench.submit("chat", prompt(4, seed=1), max_tokens=30)
    bench.step()
    bench.submit("long", prompt(100, seed=2), max_tokens=1)

    while "chat" not in bench.finished and bench.step():
        batch = bench.batches[-1]
        assert batch.rows[0].request_id == "chat"
        assert batch.num_tokens <= 16


def test_a_prefill_part_reports_progress_and_holds_its_blocks_until_aborted() -> None:
    bench = Bench()
    bench.submit("p", prompt(40), part=Part.PREFILL)

    bench.run()

    assert [event.complete_tokens for event in bench.take(Progress)] == [16, 32]
    (accepted,) = bench.take(Accepted)
    assert accepted.groups is not None
    assert [ref.key is not None for ref in accepted.groups[0]] == [True] * 10
    assert len(bench.tokens["p"]) == 1
    assert bench.cache.counts()[0].referenced == 10
    bench.scheduler.abort(RequestId("p"))
    bench.assert_baseline()


def test_a_prefill_part_that_ends_with_token_1_holds_nothing() -> None:
    bench = Bench()
    bench.submit("p", prompt(9), max_tokens=1, part=Part.PREFILL)

    bench.run()

    assert bench.finished["p"] is FinishReason.LENGTH
    bench.assert_baseline()


@pytest.mark.parametrize("received", [0, 4, 9, 10])
def test_a_decode_part_goes_on_from_what_was_received_and_computes_the_rest(received: int) -> None:
    tokens = golden(prompt(10), 6, None)
    bench = Bench()
    bench.submit("d", prompt(10), max_tokens=6, part=Part.DECODE)
    bench.step()
    (allocated,) = bench.take(Allocated)
    for position, token_id in enumerate(prompt(10)[:received]):
        place, inside = divmod(position, BLOCK)
        bench.model.memory[0, allocated.groups[0][place], inside] = token_id

    bench.scheduler.receive(RequestId("d"), received)
    assert bench.scheduler.start(RequestId("d"), {0: tokens[0]}) == []
    bench.run()

    assert bench.tokens["d"] == tokens[1:]
    assert sum(batch.num_tokens for batch in bench.batches) == (10 - received) + 1 + len(tokens) - 2
    bench.assert_baseline()


def test_a_decode_part_pulls_only_what_it_lacks() -> None:
    bench = Bench()
    bench.submit("a", prompt(10), max_tokens=1)
    bench.run()

    bench.submit("d", prompt(10), part=Part.DECODE)
    bench.step()

    (allocated,) = bench.take(Allocated)
    assert allocated.cached_tokens == 8
    assert [block is None for block in allocated.groups[0]] == [True, True, False]


def test_a_request_is_refused_when_too_much_of_its_prompt_is_cold() -> None:
    bench = Bench()
    bench.submit("cold", prompt(10), max_uncached=4)
    bench.run()
    bench.submit("warmer", prompt(10), max_tokens=1)
    bench.run()

    bench.submit("warm", prompt(10), max_uncached=4)
    bench.run()

    (failed,) = bench.take(Failed)
    assert failed.request_id == "cold"
    assert isinstance(failed.error, NeedsPrefill)
    assert bench.tokens["warm"] == golden(prompt(10), 5, None)
    bench.assert_baseline()


def test_what_can_never_run_is_refused_at_once() -> None:
    bench = Bench(num_blocks=4, context_length=32)
    bench.submit("context", prompt(30), max_tokens=3)
    bench.submit("memory", prompt(14), max_tokens=3)

    errors = [failed.error for failed in bench.take(Failed)]

    assert [type(error) for error in errors] == [InvalidRequest, InvalidRequest]
    assert "context length" in str(errors[0])
    assert "KV blocks" in str(errors[1])


def test_a_full_queue_refuses_the_next_request() -> None:
    bench = Bench(max_waiting=2)
    for name in "abc":
        bench.submit(name, prompt(4))

    (failed,) = bench.take(Failed)

    assert (failed.request_id, type(failed.error)) == ("c", Overloaded)


def test_preemption_neither_loses_nor_doubles_a_token() -> None:
    bench = Bench(num_blocks=7)
    prompts = {name: prompt(8, seed) for seed, name in enumerate("abc", start=1)}
    for name, tokens in prompts.items():
        bench.submit(name, tokens, max_tokens=12)

    bench.run()

    assert bench.scheduler.load().counters["preemptions_total"] > 0
    assert bench.tokens == {name: golden(tokens, 12, None) for name, tokens in prompts.items()}
    bench.assert_baseline()


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("part", list(Part))
def test_abort_after_any_step_gives_everything_back(steps: int, part: Part) -> None:
    bench = Bench()
    bench.submit("a", prompt(40), max_tokens=20, part=part)
    for _ in range(steps):
        bench.step()

    assert bench.scheduler.abort(RequestId("a"))

    bench.assert_baseline()
    assert not bench.scheduler.abort(RequestId("a"))


def test_a_failed_step_ends_its_requests_and_leaves_the_cache_clean() -> None:
    bench = Bench()
    bench.submit("a", prompt(20))
    batch, _ = bench.scheduler.next_batch(1.0)
    assert batch is not None

    events = bench.scheduler.fail(batch, InvalidRequest("boom"))

    assert [type(event) for event in events] == [Failed]
    bench.assert_baseline()
    assert bench.cache.counts()[0].cached == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 40),  # prompt length
        st.integers(0, 2),  # prompt family: shared prefixes
        st.integers(1, 12),  # max_tokens
        st.sampled_from([Part.WHOLE, Part.WHOLE, Part.PREFILL]),
        st.integers(0, 6),  # steps before the next arrival
        st.booleans(),  # aborted at the next arrival
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, num_blocks=st.integers(16, 40), window=st.sampled_from([None, 4, 6, 12]))
def test_any_mix_of_requests_gets_the_models_tokens_and_ends_at_baseline(
    requests: list[tuple[int, int, int, Part, int, bool]], num_blocks: int, window: int | None
) -> None:
    bench = Bench(num_blocks=num_blocks, window=window)
    aborted = set()
    for number, (length, family, max_tokens, part, steps, is_aborted) in enumerate(requests):
        bench.submit(str(number), prompt(length, family), max_tokens=max_tokens, part=part)
        for _ in range(steps):
            bench.step()
        if is_aborted and bench.scheduler.abort(RequestId(str(number))):
            aborted.add(str(number))
        for name in [n for n, p in enumerate(requests[:number]) if p[3] is Part.PREFILL and str(n) in bench.tokens]:
            bench.scheduler.abort(RequestId(str(name)))
    for _ in range(2000):
        if not bench.step():
            held = [
                r for r in bench.scheduler.request_ids() if requests[int(r)][3] is Part.PREFILL and r in bench.tokens
            ]
            if not held:
                break
            for request_id in held:
                bench.scheduler.abort(request_id)

    bench.assert_baseline()
    for number, (length, family, max_tokens, part, _, _) in enumerate(requests):
        expected = golden(prompt(length, family), max_tokens, window)
        got = bench.tokens.get(str(number), [])
        if str(number) in aborted:
            assert got == expected[: len(got)]
        else:
            assert got == (expected if part is Part.WHOLE else expected[:1])
