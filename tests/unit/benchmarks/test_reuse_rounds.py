from dataclasses import replace

import pytest

from benchmarks.reuse_rounds import WrongPath, read_round
from kvferry.results import Completion, Provenance, Timings, Usage

PREFIX, BLOCK, PROMPT = 4000, 32, 4016


def answer(worker: str, *, computed: int, cached: int, moved: int = 0, first_s: float = 1.0) -> Completion:
    return Completion(
        request_id="r",
        choices=(),
        usage=Usage(prompt_tokens=PROMPT, completion_tokens=1, cached_tokens=cached),
        provenance=Provenance(
            prefill_worker="",
            decode_worker=worker,
            prefill_computed_tokens=0,
            decode_computed_tokens=computed,
            blocks_moved=moved,
            bytes_moved=moved * 100,
            transfer_s=0.01,
            exposed_s=0.0,
        ),
        timings=Timings(first_token_s=first_s, total_s=2.0),
    )


COMPUTED = answer("a", computed=PROMPT, cached=0, first_s=6.0)
LOCAL = answer("a", computed=16, cached=4000, first_s=0.05)
BUSY = answer("a", computed=16, cached=4000)
PEER = answer("b", computed=16, cached=4000, moved=125, first_s=0.08)


def test_the_first_stream_on_the_other_worker_is_the_peer() -> None:
    row = read_round(COMPUTED, LOCAL, [BUSY, BUSY, PEER, BUSY], prefix_tokens=PREFIX, block_size=BLOCK)

    assert (row.computed_ms, row.local_ms, row.peer_ms) == pytest.approx((6000, 50, 80))
    assert (row.blocks_moved, row.lender_streams) == (125, 2)


@pytest.mark.parametrize(
    ("computed", "local", "streams"),
    [
        pytest.param(replace(COMPUTED, usage=BUSY.usage), LOCAL, [PEER], id="the prefix was cached already"),
        pytest.param(COMPUTED, PEER, [PEER], id="the second went elsewhere"),
        pytest.param(COMPUTED, COMPUTED, [PEER], id="the second computed it again"),
        pytest.param(COMPUTED, LOCAL, [BUSY, BUSY], id="nothing went to the other worker"),
        pytest.param(COMPUTED, LOCAL, [answer("b", computed=PROMPT, cached=0)], id="the other worker computed it"),
        pytest.param(COMPUTED, LOCAL, [answer("b", computed=16, cached=4000)], id="the other worker had it"),
    ],
)
def test_a_round_that_went_another_way_is_no_measurement(
    computed: Completion, local: Completion, streams: list[Completion]
) -> None:
    with pytest.raises(WrongPath):
        read_round(computed, local, streams, prefix_tokens=PREFIX, block_size=BLOCK)
