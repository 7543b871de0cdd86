"""A heartbeat says which requests it counts, and never counts one that the engine has not taken in."""

from dataclasses import replace

from deployments.worker.vitals import Vitals
from engine.events import LoadSnapshot, StepOutput
from kv_store.local_cache import CacheChanges, GroupCounts
from messages.v1 import worker_pb2 as pb
from telemetry.metrics import WorkerCounter, WorkerGauge
from telemetry.step_record import StepRecord

LOAD = LoadSnapshot(
    groups=(GroupCounts(name="full", total=10, free=4, cached=3, referenced=3),),
    running=2,
    waiting=1,
    held=0,
    queued_prefill_tokens=70,
    context_tokens=130,
    counters={"engine_steps_total": 5.0, "aborts_total": 1.0},
)
OUTPUT = StepOutput(events=(), changes=CacheChanges(stored=(), removed=()), load=LOAD)


def message_of(vitals: Vitals) -> pb.Load:
    message = vitals.message()
    assert message is not None
    return message


def test_before_the_engine_has_said_anything_there_is_no_heartbeat_and_the_worker_counts_as_busy() -> None:
    vitals = Vitals()

    assert vitals.message() is None
    assert vitals.is_busy


def test_load_and_counters_of_engine_and_worker_are_in_it() -> None:
    vitals = Vitals()
    vitals.take(OUTPUT)
    vitals.count(WorkerCounter.ABORTS, 2)
    vitals.set_count(WorkerGauge.PUBLISH_QUEUE_DEPTH, 7)

    message = message_of(vitals)

    assert (message.running, message.waiting, message.queued_prefill_tokens, message.context_tokens) == (2, 1, 70, 130)
    group = message.groups[0]
    assert (group.total_blocks, group.free_blocks, group.cached_blocks, group.referenced_blocks) == (10, 4, 3, 3)
    assert message.counters["aborts_total"] == 3.0
    assert message.counters["engine_steps_total"] == 5.0
    assert message.counters["publish_queue_depth"] == 7.0
    assert not message.HasField("times")


def test_a_reservation_is_admitted_with_the_load_that_has_its_request() -> None:
    vitals = Vitals()
    for number in (1, 2, 3):
        vitals.note_submission(number, pb.Reservation(issuer="a", sequence=number))
    vitals.note_submission(4, pb.Reservation())

    vitals.take(OUTPUT)
    none = list(message_of(vitals).admitted)
    vitals.take(replace(OUTPUT, num_submitted=2))
    two = message_of(vitals).admitted[0].through
    vitals.take(replace(OUTPUT, num_submitted=4))
    three = list(message_of(vitals).admitted)

    assert none == []
    assert two == 2
    assert [(seen.issuer, seen.through, list(seen.beyond)) for seen in three] == [("a", 3, [])]


def test_step_times_are_said_once_a_step_was_measured() -> None:
    vitals = Vitals()
    vitals.take(OUTPUT)
    for tokens in range(1, 50):
        record = StepRecord(
            at_s=0.0, prefill_tokens=tokens, decode_tokens=0, context_tokens=0, num_rows=1, duration_ms=10.0 + tokens
        )
        vitals.note_step(record)

    times = message_of(vitals).times

    assert 0.9 < times.prefill_token_ms < 1.1
    assert 8.0 < times.base_ms < 12.0


def test_a_worker_without_requests_is_not_busy() -> None:
    vitals = Vitals()

    vitals.take(replace(OUTPUT, load=replace(LOAD, running=0, waiting=0)))

    assert not vitals.is_busy
