"""A choice that has lost its worker goes on on another one, after the tokens that the client has already."""

import itertools

import pytest

from engine.events import Accepted, Allocated, Failed
from engine.request import Part
from messages.errors import InvalidRequest
from messages.requests import RequestId
from tests.unit.engine.virtual_bench import BLOCK, Bench, golden, prompt


def whole_story(window: int | None = None, choice: int = 0, skip: int = 0) -> tuple[list[int], list[int]]:
    """A prompt of 9 tokens, and the 12 that follow without an end token among them."""
    stories = ((prompt(9, seed), golden(prompt(9, seed), 12, window, choice)) for seed in itertools.count())
    return next(itertools.islice((story for story in stories if len(story[1]) == 12), skip, None))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lost_after", range(1, 12))
@pytest.mark.parametrize("choice", [0, 2])
def test_a_replay_gives_exactly_the_tokens_that_are_missing(window: int | None, lost_after: int, choice: int) -> None:
    asked, tokens = whole_story(window, choice)
    bench = Bench(window=window)

    bench.submit("r", asked, max_tokens=12, generated=tuple(tokens[:lost_after]), choice=choice)
    bench.run()

    assert bench.tokens["r" if choice == 0 else "r/2"] == tokens[lost_after:]
    bench.assert_baseline()


@pytest.mark.parametrize("lost_after", [1, 6, 7, 8])
def test_a_replay_is_handed_off_with_the_blocks_of_what_was_generated(lost_after: int) -> None:
    asked, tokens = whole_story()
    given = (*asked, *tokens[:lost_after])
    owner, reader = Bench(), Bench()
    replay = {"max_tokens": 12, "generated": tuple(tokens[:lost_after])}

    owner.submit("r", asked, part=Part.PREFILL, **replay)  # type: ignore[arg-type]
    owner.run()
    reader.submit("r", asked, part=Part.DECODE, **replay)  # type: ignore[arg-type]
    reader.step()
    (accepted,), (allocated,) = owner.take(Accepted), reader.take(Allocated)
    assert isinstance(accepted, Accepted)
    assert isinstance(allocated, Allocated)
    assert accepted.groups is not None
    for ref, local_id in zip(accepted.groups[0], allocated.groups[0], strict=True):
        assert ref is not None
        assert local_id is not None
        for inside in range(BLOCK):
            if (0, ref.block_id, inside) in owner.model.memory:
                reader.model.memory[0, local_id, inside] = owner.model.memory[0, ref.block_id, inside]
    reader.receive("r", len(given))
    reader.scheduler.start(RequestId("r"), {0: owner.tokens["r"][0]})
    reader.run()
    owner.scheduler.abort(RequestId("r"))

    assert accepted.num_given_tokens == len(given)
    assert [ref is not None and ref.key is not None for ref in accepted.groups[0]] == [
        (number + 1) * BLOCK <= len(given) for number in range(-(-len(given) // BLOCK))
    ]
    assert owner.tokens["r"] + reader.tokens["r"] == tokens[lost_after:]
    assert reader.computed_prompt_tokens() == 0
    owner.assert_baseline()
    reader.assert_baseline()


def test_a_replay_finds_what_another_choice_left_in_the_prefix_cache() -> None:
    asked, tokens = whole_story()
    bench = Bench()
    bench.submit("first", asked, max_tokens=12)
    bench.run()

    bench.submit("r", asked, max_tokens=12, generated=tuple(tokens[:8]))
    bench.run()

    assert bench.tokens["r"] == tokens[8:]
    accepted = bench.take(Accepted)[-1]
    assert isinstance(accepted, Accepted)
    assert accepted.cached_tokens == 16


def test_a_replay_is_preempted_like_any_other_request() -> None:
    bench = Bench(num_blocks=12)
    stories = {name: whole_story(skip=skip) for skip, name in enumerate("abc")}

    for name, (asked, tokens) in stories.items():
        bench.submit(name, asked, max_tokens=12, generated=tuple(tokens[:4]))
    bench.run()

    assert bench.scheduler.load().counters["preemptions_total"] > 0
    assert bench.tokens == {name: tokens[4:] for name, (_, tokens) in stories.items()}
    bench.assert_baseline()


@pytest.mark.parametrize(("n", "num_generated"), [(2, 1), (1, 5), (1, 6)])
def test_a_replay_of_several_choices_or_of_one_that_has_ended_is_refused(n: int, num_generated: int) -> None:
    bench = Bench()

    bench.submit("r", prompt(9), max_tokens=5, n=n, generated=tuple(range(num_generated)))

    (failed,) = bench.take(Failed)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidRequest)
    assert failed.error.context["param"] == "generated_token_ids"
    bench.assert_baseline()
