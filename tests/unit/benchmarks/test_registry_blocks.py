import random

import pytest

from benchmarks.registry_blocks import Population, fresh_keys

SMALL = Population(
    num_workers=6,
    blocks_per_worker=100,
    num_documents=8,
    documents_per_worker=4,
    document_blocks=5,
    conversation_blocks=15,
    min_prompt_blocks=2,
    max_prompt_blocks=30,
)


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311


def holders_of(population: Population) -> dict[bytes, set[int]]:
    holders: dict[bytes, set[int]] = {}
    for worker in range(population.num_workers):
        for key in population.held_by(worker):
            holders.setdefault(key, set()).add(worker)
    return holders


def longest_held_run(keys: list[bytes], holders: dict[bytes, set[int]]) -> int:
    """Leading blocks that one single worker holds."""
    common: set[int] = set(range(SMALL.num_workers))
    for position, key in enumerate(keys):
        common &= holders.get(key, set())
        if not common:
            return position
    return len(keys)


@pytest.mark.parametrize("worker", range(SMALL.num_workers))
def test_every_worker_holds_as_many_different_blocks_as_it_should(worker: int) -> None:
    held = list(SMALL.held_by(worker))

    assert len(held) == len(set(held)) == SMALL.blocks_per_worker


def test_the_number_of_distinct_blocks_is_what_the_workers_hold_together() -> None:
    assert SMALL.num_distinct_blocks == len(holders_of(SMALL)) < SMALL.num_blocks


def test_only_documents_are_held_by_several_workers() -> None:
    shared = [key for key, workers in holders_of(SMALL).items() if len(workers) > 1]

    assert 0 < len(shared) <= SMALL.num_documents * SMALL.document_blocks


def test_the_full_population_is_a_million_blocks() -> None:
    full = Population()

    assert full.num_blocks == 1_000_000
    assert full.num_distinct_blocks == 942_656


def test_a_prompt_is_held_exactly_as_deep_as_it_says() -> None:
    holders, draw = holders_of(SMALL), dice(7)
    prompts = [SMALL.prompt(draw) for _ in range(300)]

    assert [longest_held_run(keys, holders) for keys, _ in prompts] == [depth for _, depth in prompts]
    assert all(SMALL.min_prompt_blocks <= len(keys) <= SMALL.max_prompt_blocks for keys, _ in prompts)


def test_prompts_hit_nothing_a_document_or_more() -> None:
    draw = dice(7)

    depths = {SMALL.prompt(draw)[1] for _ in range(300)}

    assert {0, SMALL.document_blocks, SMALL.conversation_blocks} <= depths


def test_every_process_makes_the_same_blocks_and_fresh_ones_are_never_the_same() -> None:
    draw = dice(1)

    assert list(SMALL.held_by(3)) == list(SMALL.held_by(3))
    assert not set(fresh_keys(draw, 20)) & set(fresh_keys(draw, 20))
