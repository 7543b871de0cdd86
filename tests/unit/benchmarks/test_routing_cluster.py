import numpy as np

from benchmarks.bare_routing import BareChoice, hash_whole
from benchmarks.routing_cluster import HOLDER_SHARE, RoutedCluster


def test_every_run_decides_the_same() -> None:
    first, second = RoutedCluster(100, 20_000), RoutedCluster(100, 20_000)

    assert [first.decide(seed) for seed in range(20)] == [second.decide(seed) for seed in range(20)]


def test_some_workers_hold_a_part_of_the_prompt() -> None:
    matched = RoutedCluster(200, 20_000).matched_tokens

    assert (matched > 0).sum() == 200 * HOLDER_SHARE
    assert matched.max() <= 20_000


def test_a_long_prompt_is_computed_by_another_worker_than_decodes_it() -> None:
    decode_row, prefill_row = RoutedCluster(100, 20_000).decide(1)

    assert decode_row != prefill_row


def test_asking_the_pools_leaves_rows_to_choose_from() -> None:
    decode_row, prefill_row = RoutedCluster(100, 20_000).decide_with_pools(1)

    assert decode_row != prefill_row


def test_candidates_are_worded_of_one_ranking() -> None:
    cluster = RoutedCluster(100, 20_000)
    cluster.prepare_candidates()

    assert len({candidate.worker_id for candidate in cluster.word_candidates()}) == 16


def test_a_heartbeat_changes_what_is_decided_upon() -> None:
    cluster = RoutedCluster(20, 20_000)
    before = [cluster.decide(seed) for seed in range(5)]
    for _ in range(100):
        cluster.beat()

    assert [cluster.decide(seed) for seed in range(5)] != before


def test_the_bare_choice_is_the_cheapest_of_each_column() -> None:
    decode, prefill = BareChoice(50).choose()

    draw = np.random.default_rng(1)
    assert (decode, prefill) == (draw.random(50).argmin(), draw.random(50).argmin())
    assert len(hash_whole(b"prompt")) == 32
