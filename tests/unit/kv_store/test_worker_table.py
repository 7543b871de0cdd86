from dataclasses import replace

import pytest

from kv_store.registry.protocol import WorkerRecord
from kv_store.registry.worker_table import TableCopy, merge
from messages.errors import RegistryError


def worker(worker_id: str, incarnation: str = "life-1") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        address="127.0.0.1:1",
        pool="short",
        role="unified",
        model="tiny",
        fingerprint="f" * 32,
        block_size=32,
        key_model="tiny@1",
        key_codec="raw-float32",
        context_length=8192,
    )


def copy_of(*rows: tuple[WorkerRecord, int, int], asked_at_s: float = 100.0, version: bytes = b"v1") -> TableCopy:
    reply: list[object] = [version, b"full"]
    for record, remaining_ms, age_ms in rows:
        reply += [remaining_ms, age_ms, record.to_json().encode()]
    return TableCopy().updated(reply, asked_at_s)


def records(copies: list[TableCopy], now_s: float) -> dict[str, WorkerRecord]:
    return {worker_id: row.record for worker_id, row in merge(copies, now_s).items()}


def test_a_record_survives_json() -> None:
    assert WorkerRecord.from_json(worker("a").to_json()) == worker("a")


def test_a_record_of_an_older_version_has_the_first_generation() -> None:
    text = worker("a").to_json().replace('"generation":0,', "")

    assert WorkerRecord.from_json(text).generation == 0
    assert "generation" not in text


def test_a_record_of_a_newer_version_is_read_without_what_is_new() -> None:
    text = worker("a").to_json().replace("{", '{"invented_later":1,', 1)

    assert WorkerRecord.from_json(text) == worker("a")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"worker_id":"a"}'])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(RegistryError):
        WorkerRecord.from_json(text)


def test_leases_count_from_the_question() -> None:
    copy = copy_of((worker("a"), 500, 0), asked_at_s=100.0)

    assert records([copy], 100.4) == {"a": worker("a")}
    assert records([copy], 100.5) == {}


def test_a_copy_with_a_lapsed_lease_asks_for_everything() -> None:
    copy = copy_of((worker("a"), 500, 0), (worker("b"), 9000, 0), asked_at_s=100.0)

    assert copy.version_to_ask(100.4) == b"v1"
    assert copy.version_to_ask(100.5) == b""


def test_an_up_to_date_copy_stays() -> None:
    copy = copy_of((worker("a"), 500, 0))

    assert copy.updated([b"v1"], 100.1) is copy


def test_an_unreadable_row_does_not_hide_the_others() -> None:
    copy = TableCopy().updated([b"v1", b"full", 500, 0, b"?", 500, 0, worker("a").to_json().encode()], 100.0)

    assert records([copy], 100.0) == {"a": worker("a")}


def test_a_shard_that_came_back_empty_hides_nobody() -> None:
    full, empty = copy_of((worker("b"), 900, 5), (worker("a"), 900, 5)), copy_of()

    assert list(records([empty, full], 100.0)) == ["a", "b"]


def test_of_two_lives_the_one_that_registered_last_counts() -> None:
    old, new = copy_of((worker("a", "life-1"), 9000, 5000)), copy_of((worker("a", "life-2"), 500, 10))

    assert records([old, new], 100.0) == {"a": worker("a", "life-2")}
    assert records([new, old], 100.0) == {"a": worker("a", "life-2")}


def test_of_two_generations_of_a_life_the_higher_counts_whenever_it_registered() -> None:
    """Rule 11: a shard that was away during a clear still lists the old generation."""
    cleared = replace(worker("a"), generation=2)
    stale, fresh = copy_of((worker("a"), 9000, 10)), copy_of((cleared, 500, 5000))

    assert records([stale, fresh], 100.0) == {"a": cleared}
    assert records([fresh, stale], 100.0) == {"a": cleared}
