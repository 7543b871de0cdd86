"""Lenders that die, fall silent, know nothing or send wrong bytes: a recompute at most, and nothing is left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.worker_group import WorkerGroup, warm
from tests.integration.worker_pair import golden, prompt, save_tiny_model

TWO = {"a": "unified", "b": "unified"}
THREE = TWO | {"c": "unified"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def two(folder: Path) -> AsyncIterator[WorkerGroup]:
    async with WorkerGroup(folder, TWO) as group:
        yield group


async def test_a_lender_that_has_evicted_lends_what_is_left(folder: Path) -> None:
    """Case 32 and rule 5: the registry is a hint; what is not there is computed."""
    async with WorkerGroup(folder, TWO, num_blocks=12) as group:
        tokens = prompt(64)
        await warm(group, "a", tokens)
        await warm(group, "a", prompt(60, seed=1))
        await group.until_baseline()

        answer = await group.run_on("b", tokens, group.source("a", 8))

        assert answer.tokens[0] == await golden(folder, tokens)
        assert 0 < answer.done.reused_tokens < 56
        assert answer.done.computed_prompt_tokens == 64 - answer.done.reused_tokens
        await group.until_baseline()


async def test_a_lender_that_holds_nothing_costs_one_call(two: WorkerGroup, folder: Path) -> None:
    tokens = prompt(50)

    answer = await two.run_on("b", tokens, two.source("a", 6))

    assert answer.tokens[0] == await golden(folder, tokens)
    assert (answer.cached_tokens, answer.done.reused_tokens, answer.done.computed_prompt_tokens) == (0, 0, 50)
    await two.until_baseline()
    assert (two.counter("a", "lends_refused_total"), two.counter("b", "reuse_failures_total")) == (1, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"incarnation": "of an earlier life"}, {"worker_id": "gone", "address": "127.0.0.1:1"}, {"num_blocks": 1000}],
)
async def test_a_wrong_hint_costs_a_recompute_at_most(
    two: WorkerGroup, folder: Path, wrong: dict[str, str | int]
) -> None:
    """Rule 6: another life of a worker lends nothing in the name of the first."""
    tokens = prompt(50)
    await warm(two, "a", tokens)

    answer = await two.run_on("b", tokens, replace(two.source("a", 6), **wrong))

    assert answer.tokens[0] == await golden(folder, tokens)
    assert answer.done.reused_tokens == (48 if "num_blocks" in wrong else 0)
    await two.until_baseline()


async def test_a_lender_that_dies_in_the_middle_of_the_read_costs_a_recompute(two: WorkerGroup, folder: Path) -> None:
    tokens = prompt(100)
    await warm(two, "a", tokens)
    two.network.stop(two.agents["a"])
    source = two.source("a", 12)
    async with two.submitted("b", tokens, source) as exchange:
        await two.until(lambda: two.sample("b").waiting == 1)
        await two.kill("a")

        answer = await two.answer(exchange)

    assert answer.tokens[0] == await golden(folder, tokens)
    assert (answer.done.reused_tokens, answer.done.computed_prompt_tokens) == (0, 100)
    await two.until(lambda: all(group.referenced == 0 for group in two.sample("b").groups))


async def test_a_silent_lender_delays_one_request_and_its_late_bytes_reach_nobody(folder: Path) -> None:
    """Rule 1: blocks that a read may still write are not reused, so the request goes on with others."""
    async with WorkerGroup(folder, TWO, lease_s=1.0) as group:
        tokens, others = prompt(100), prompt(40, seed=2)
        await warm(group, "a", tokens)
        group.network.stop(group.agents["a"])
        async with group.submitted("b", tokens, group.source("a", 12)) as exchange:
            await group.until(lambda: group.sample("b").waiting == 1)
            meanwhile = await group.run_on("b", others, name="meanwhile")
            answer = await group.answer(exchange)
        kept = group.sample("b").groups[0].referenced
        group.network.resume(group.agents["a"])
        await group.until_baseline()

        again = await group.run_on("b", tokens, name="again")

    assert meanwhile.tokens[0] == await golden(folder, others)
    assert answer.tokens[0] == again.tokens[0] == await golden(folder, tokens)
    assert answer.done.reused_tokens == 0
    assert kept > 0


async def test_a_request_that_is_cancelled_while_it_borrows_gives_everything_back(two: WorkerGroup) -> None:
    """Rule 4: on both sides, after the read is quiet."""
    tokens = prompt(100)
    await warm(two, "a", tokens)
    two.network.stop(two.agents["a"])
    async with two.submitted("b", tokens, two.source("a", 12)):
        await two.until(lambda: two.sample("b").waiting == 1)
        await asyncio.sleep(0.3)
        lent = two.sample("a")
    two.network.resume(two.agents["a"])

    await two.until_baseline()

    # While it was read it counted as what it is.
    assert lent.handoffs == 1
    assert lent.groups[0].referenced == 12


async def test_a_lease_that_ends_before_close_costs_a_recompute(folder: Path) -> None:
    """Case 36: bytes that were read after the lease count for nothing."""
    plan = "handoff.close:delay=1.5,handoff.heartbeat:error"
    async with WorkerGroup(folder, TWO, lease_s=0.6, faults=plan, handoff={"read_deadline_s": 0.5}) as group:
        tokens = prompt(60)
        await warm(group, "a", tokens)

        answer = await group.run_on("b", tokens, group.source("a", 7))

        assert answer.tokens[0] == await golden(folder, tokens)
        assert answer.done.reused_tokens == 0
        await group.until_baseline(4.0)


async def test_bytes_that_changed_on_their_way_are_found_and_never_cached(folder: Path) -> None:
    """Rules 25 and 26."""
    async with WorkerGroup(folder, TWO, faults="transfer.read:corrupt*1@b", handoff={"digest": True}) as group:
        tokens = prompt(60)
        await warm(group, "a", tokens)

        answer = await group.run_on("b", tokens, group.source("a", 7))
        again = await group.run_on("b", tokens, name="again")

        assert answer.tokens[0] == again.tokens[0] == await golden(folder, tokens)
        assert answer.done.reused_tokens < 56
        await group.until_baseline()


async def test_the_part_of_an_owner_that_is_gone_is_asked_of_the_other(folder: Path) -> None:
    async with WorkerGroup(folder, THREE) as group:
        tokens = prompt(100)
        await warm(group, "a", tokens)
        gone = replace(group.source("b", 5), worker_id="gone", address="127.0.0.1:1")

        answer = await group.run_on("c", tokens, group.source("a", 12), gone)

        assert answer.tokens[0] == await golden(folder, tokens)
        assert (list(answer.done.reused_from), answer.done.reused_tokens) == (["a"], 96)
        await group.until_baseline()


async def test_the_good_prefix_ends_where_the_first_part_came_short(folder: Path) -> None:
    async with WorkerGroup(folder, THREE) as group:
        tokens = prompt(100)
        await warm(group, "b", tokens[:41])
        gone = replace(group.source("a", 12), worker_id="gone", address="127.0.0.1:1")

        answer = await group.run_on("c", tokens, gone, group.source("b", 5))

        assert answer.tokens[0] == await golden(folder, tokens)
        assert (list(answer.done.reused_from), answer.done.reused_tokens) == (["b"], 40)
        await group.until_baseline()


async def test_leaving_a_routed_stream_while_it_borrows_gives_everything_back(two: WorkerGroup) -> None:
    tokens = prompt(87)
    await warm(two, "a", tokens)
    await asyncio.sleep(0.2)
    async with two.submitted("a", prompt(9, seed=3), name="busy", max_tokens=200, end_token_ids=()):
        await two.until(lambda: two.sample("a").running == 1)
        two.network.stop(two.agents["a"])
        route = await two.route(tokens, name="second")
        async with aclosing(route.tokens()) as events:
            waiting = asyncio.ensure_future(anext(events))
            await two.until(lambda: two.sample("b").waiting == 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        two.network.resume(two.agents["a"])

    await two.until_baseline()
