"""The loop's thread with the scheduler's virtual model: commands in, events out, faults contained."""

import queue
import time
from collections.abc import Sequence

import pytest

from engine.admission import SchedulerLimits
from engine.batch import Batch, RowResult, Sampled
from engine.events import Accepted, Failed, StepOutput
from engine.loop import EngineLoop
from engine.request import Part
from engine.scheduler import Scheduler
from kv_store.block_key import KeyExtras
from kv_store.layout import BlockLayout, KvGroup
from kv_store.local_cache import BlockCopy, LocalCache
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import FinishReason, TokenEvent
from telemetry.step_record import StepRecord

BLOCK = 4


class CountingModel:
    """Samples the context length; raises on a prompt that starts with 13."""

    def run(self, batch: Batch) -> list[RowResult]:
        if any(row.token_ids[0] == 13 for row in batch.rows):
            raise RuntimeError("unlucky")
        return [RowResult(samples=(Sampled(token_ids=(row.end,)),) if row.sampling else ()) for row in batch.rows]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        assert not copies


class PlainIdentity:
    def extras(self, request: GenerationRequest) -> KeyExtras:
        return KeyExtras(model="m", block_size=BLOCK, codec="raw", adapter=request.adapter, salt=request.salt)


class Loop:
    def __init__(self) -> None:
        group = KvGroup(name="full", layers=(0,), num_kv_heads=1, k_dim=2, v_dim=2)
        cache = LocalCache(BlockLayout(groups=(group,), block_size=BLOCK, model_digest="m"), (32,))
        self.outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self.records: list[StepRecord] = []
        scheduler = Scheduler(cache, SchedulerLimits(block_size=BLOCK, context_length=100))
        self.engine = EngineLoop(
            scheduler, cache, CountingModel(), PlainIdentity(), self.outputs.put, self.records.append
        )

    def events_until_end(self, request_id: str) -> list[object]:
        events: list[object] = []
        while True:
            output = self.outputs.get(timeout=5)
            for event in output.events:
                if event.request_id == request_id:
                    events.append(event)
                    if isinstance(event, Failed) or (isinstance(event, TokenEvent) and event.finish_reason):
                        return events


@pytest.fixture
def loop():
    loop = Loop()
    loop.engine.start()
    yield loop
    loop.engine.close()
    assert not loop.engine.is_alive


def request(name: str, *tokens: int, max_tokens: int = 3) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(request_id=RequestId(name), model="m", prompt_token_ids=tokens, sampling=sampling)


def test_a_request_runs_to_its_end(loop: Loop) -> None:
    loop.engine.submit(request("a", 1, 2, 3, 4, 5), Part.WHOLE)

    events = loop.events_until_end("a")

    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert isinstance(events[0], Accepted)
    assert [token.token_ids for token in tokens] == [(5,), (6,), (7,)]
    assert tokens[-1].finish_reason is FinishReason.LENGTH


def test_every_step_leaves_a_record(loop: Loop) -> None:
    loop.engine.submit(request("a", 1, 2, 3, 4, 5), Part.WHOLE)
    loop.events_until_end("a")

    assert [(record.prefill_tokens, record.decode_tokens, record.context_tokens) for record in loop.records] == [
        (5, 0, 5),
        (0, 1, 6),
        (0, 1, 7),
    ]


def test_a_fault_of_the_model_ends_its_request_and_not_the_loop(loop: Loop) -> None:
    loop.engine.submit(request("bad", 13, 1), Part.WHOLE)
    (failed,) = [event for event in loop.events_until_end("bad") if isinstance(event, Failed)]

    loop.engine.submit(request("good", 1, 2), Part.WHOLE)

    assert "unlucky" in str(failed.error)
    assert isinstance(loop.events_until_end("good")[-1], TokenEvent)


def test_an_aborted_request_gives_its_blocks_back_and_says_nothing_more(loop: Loop) -> None:
    loop.engine.submit(request("a", 1, 2, max_tokens=90), Part.WHOLE)
    loop.outputs.get(timeout=5)
    loop.engine.abort(RequestId("a"))

    deadline_s = time.monotonic() + 5
    while loop.outputs.get(timeout=5).load.running and time.monotonic() < deadline_s:
        pass
    loop.engine.submit(request("b", 1), Part.WHOLE)
    loop.events_until_end("b")

    load = loop.outputs.get(timeout=5).load if not loop.outputs.empty() else None
    assert load is None or load.groups[0].referenced == 0


def test_an_idle_loop_sleeps(loop: Loop) -> None:
    loop.engine.submit(request("a", 1), Part.WHOLE)
    loop.events_until_end("a")
    before = time.thread_time()

    time.sleep(0.2)

    assert time.thread_time() - before < 0.1
    assert loop.outputs.qsize() <= 1


def test_a_clear_that_nobody_waits_for_any_more_does_no_harm() -> None:
    loop = Loop()
    left, awaited = loop.engine.clear_cache(), loop.engine.clear_cache()
    left.cancel()

    loop.engine.start()

    assert awaited.result(timeout=5) == 0
    loop.engine.submit(request("a", 1, 2, 3), Part.WHOLE)
    assert len(loop.events_until_end("a")) > 1
    loop.engine.close()
