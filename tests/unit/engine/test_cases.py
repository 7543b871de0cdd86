"""Faults that users of comparable systems reported (numbers of the case list), on the engine; block size 16."""

import pytest

from engine.batch import Sampled
from engine.events import Accepted
from engine.request import Part, RequestState, Totals
from kv_store.block_key import KeyExtras, root_key
from messages.errors import InvalidRequest
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import FinishReason
from tests.unit.engine.virtual_bench import Bench, golden, prompt

BLOCK = 16
STOP = 99


def bench(**options: int) -> Bench:
    return Bench(**{"num_blocks": 256, "block_size": BLOCK, "max_step_tokens": 64, "max_chunk_tokens": 64} | options)


def cached_tokens(engine: Bench) -> list[int]:
    return [event.cached_tokens for event in engine.take(Accepted)]


def test_case_17_cached_tokens_are_whole_blocks_and_never_more_than_the_prompt() -> None:
    engine = bench()
    for name in ("first", "second"):
        engine.submit(name, prompt(87))
        engine.run()

    assert cached_tokens(engine) == [0, 80]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 895])
def test_case_20_a_full_hit_computes_at_least_one_token_and_changes_nothing(length: int) -> None:
    engine = bench(num_blocks=300, context_length=1000)
    computed = []
    for name in ("first", "second"):
        engine.submit(name, prompt(length), max_tokens=6)
        engine.run()
        computed.append(engine.computed_prompt_tokens())

    assert engine.tokens["first"] == engine.tokens["second"] == golden(prompt(length), 6, None)
    assert computed[1] - computed[0] == length - (length - 1) // BLOCK * BLOCK
    assert cached_tokens(engine)[1] == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(("total", "expected"), [(65, 64), (64, 48)])
def test_case_42_the_last_sampled_token_has_no_kv(total: int, expected: int) -> None:
    engine = bench()
    engine.submit("turn1", prompt(50), max_tokens=total - 50, end=())
    engine.run()
    history = prompt(50) + engine.tokens["turn1"]
    assert len(history) == total

    engine.submit("turn2", [*history, 1, 2, 3], max_tokens=1)
    engine.run()

    assert cached_tokens(engine)[1] == expected


def test_case_49_another_salt_hits_nothing_and_the_same_salt_does() -> None:
    engine = bench()
    for name, salt in (("a", b"s1"), ("b", b"s2"), ("c", b"s1")):
        engine.submit(name, prompt(40), salt=salt)
        engine.run()

    assert cached_tokens(engine) == [0, 0, 32]


def test_case_53_a_recycled_block_is_not_found_under_its_old_key() -> None:
    engine = bench(num_blocks=4)
    engine.submit("a", prompt(60, 1), max_tokens=1)
    engine.run()
    engine.submit("b", prompt(60, 2), max_tokens=1)
    engine.run()

    engine.submit("a again", prompt(60, 1), max_tokens=1)
    engine.run()

    assert cached_tokens(engine) == [0, 0, 0]
    assert engine.tokens["a again"] == engine.tokens["a"]


def test_case_54_hits_are_counted_once_however_often_admission_fails() -> None:
    engine = bench(num_blocks=7)
    engine.submit("warm", prompt(33, 1), max_tokens=1)
    engine.run()
    engine.submit("holder", prompt(70, 2), max_tokens=20, part=Part.PREFILL)
    engine.run()
    engine.submit("blocked", prompt(60, 1), max_tokens=1)
    for _ in range(5):
        engine.step()
    before = engine.scheduler.load().counters["prefix_hit_tokens_total"]
    engine.scheduler.abort(RequestId("holder"))
    engine.run()

    assert before == 0
    assert engine.scheduler.load().counters["prefix_hit_tokens_total"] == cached_tokens(engine)[-1] == 32


def state(max_tokens: int, **sampling: tuple[int, ...]) -> RequestState:
    request = GenerationRequest(
        request_id=RequestId("r"),
        model="m",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
    )
    root = root_key(KeyExtras(model="m", block_size=BLOCK, codec="raw-float32", adapter=None, salt=b""))
    return RequestState(request=request, part=Part.WHOLE, root=root, keys=[], totals=Totals(arrived_s=0.0))


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "reason"),
    [
        (5, (10, 11, STOP), FinishReason.STOP),
        (2, (10, 11), FinishReason.LENGTH),
        (3, (10, 11, STOP), FinishReason.STOP),
    ],
)
def test_case_72_stops_and_limits_apply_inside_a_step_of_several_tokens(
    max_tokens: int, tokens: tuple[int, ...], reason: FinishReason
) -> None:
    request = state(max_tokens, stop_token_ids=(STOP,))

    event = request.accept(Sampled(token_ids=(10, 11, STOP, 20, 21, 22)))

    assert (event.token_ids, event.finish_reason) == (tokens, reason)
    assert request.generated == list(tokens)


@pytest.mark.parametrize(
    ("end", "stop", "reason", "stop_token_id"),
    [
        ((7,), (), FinishReason.STOP, None),
        ((), (7,), FinishReason.STOP, 7),
        ((7,), (7,), FinishReason.STOP, None),
        ((), (), FinishReason.LENGTH, None),
    ],
)
def test_case_94_end_tokens_stop_tokens_and_ignored_ones_are_told_apart(
    end: tuple[int, ...], stop: tuple[int, ...], reason: FinishReason, stop_token_id: int | None
) -> None:
    request = state(3, end_token_ids=end, stop_token_ids=stop)

    event = request.accept(Sampled(token_ids=(5, 7, 8)))

    assert (event.finish_reason, event.stop_token_id) == (reason, stop_token_id)
    assert len(event.token_ids) == (3 if reason is FinishReason.LENGTH else 2)


def test_case_81_an_empty_prompt_is_refused_and_the_next_request_works() -> None:
    engine = bench()
    engine.submit("empty", [])
    engine.submit("next", prompt(5), max_tokens=3)
    engine.run()

    (failed,) = [event for event in engine.events if event.request_id == "empty"]
    assert isinstance(failed.error, InvalidRequest)
    assert engine.tokens["next"] == golden(prompt(5), 3, None)
