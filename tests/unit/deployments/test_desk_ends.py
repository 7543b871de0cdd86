"""How requests end at a worker's desk, and what is counted and told then."""

import logging

import pytest

from messages.errors import DeadlineExceeded
from messages.requests import RequestId
from messages.v1 import worker_pb2 as pb
from messages.wire import handoff_from_wire, handoff_to_wire
from telemetry.metrics import WorkerCounter
from tests.unit.deployments.desk_bench import DeskBench, request


async def test_what_the_owner_ends_itself_is_no_late_message() -> None:
    """The readers have released the hand-offs when the requests, which have no token yet, end here."""
    async with DeskBench() as bench:
        bench.model.may_run.clear()
        bench.prefill("aborted", max_tokens=3)
        bench.release(handoff_from_wire((await bench.until_heard("accepted", "aborted")).accepted.handoff))
        bench.abort("aborted")
        bench.model.may_run.set()
        await bench.until_idle()
        bench.model.may_run.clear()
        bench.prefill("finished", max_tokens=1)
        bench.release(handoff_from_wire((await bench.until_heard("accepted", "finished")).accepted.handoff))
        bench.model.may_run.set()
        await bench.until_heard("tokens", "finished")
        await bench.until_idle()

        assert bench.table.num_late == 0
        assert (len(bench.table), bench.table.num_granted) == (0, 2)


async def test_only_a_request_that_nobody_waits_for_is_aborted() -> None:
    """Metric aborts: an error that the worker answers with is none, nor is an abort of what has ended."""
    async with DeskBench() as bench:
        bench.prefill("failed")
        await bench.until_heard("tokens", "failed")
        bench.desk.fail_if_here(RequestId("failed"), DeadlineExceeded("the request's time is over"))
        bench.abort("failed")
        before = await bench.count(WorkerCounter.ABORTS)

        bench.prefill("left")
        await bench.until_heard("tokens", "left")
        bench.abort("left")
        bench.prefill("lost")
        await bench.until_heard("tokens", "lost")
        bench.desk.detach(bench.session)
        bench.desk.attach(bench.session)

        await bench.until_idle()
        assert before == 0
        assert await bench.count(WorkerCounter.ABORTS) == 2


async def test_a_hand_off_that_does_not_fit_is_given_back_at_once() -> None:
    """Rules 3 and 13: the owner frees at once, not with the lease; the mismatch is counted as one."""
    async with DeskBench() as owner, DeskBench() as reader:
        owner.prefill("r")
        accepted = (await owner.until_heard("accepted", "r")).accepted
        handoff = handoff_from_wire(accepted.handoff)
        prepare = pb.Prepare(request=request("r"), handoff=handoff_to_wire(handoff))

        reader.desk.handle(reader.session, pb.GatewayMessage(prepare=prepare))
        start = pb.Start(request_id="r", first_tokens=[pb.FirstToken(choice=0, token_id=8)])
        reader.desk.handle(reader.session, pb.GatewayMessage(start=start))
        await reader.until_heard("work_done", "r")

        assert reader.peers.released == [(handoff.handoff_id, "not needed")]
        assert reader.peers.asked == [("w", "life", "a:1")]
        assert await reader.count(WorkerCounter.HANDSHAKES_LAYOUT) == 1
        assert await reader.count(WorkerCounter.TRANSFER_FAILURES) == 1
        assert (await reader.until_heard("work_done", "r")).work_done.computed_prompt_tokens == 8
        await reader.until_idle()


async def test_a_client_is_not_told_what_an_unexpected_exception_says(caplog: pytest.LogCaptureFixture) -> None:
    """Its text may hold a prompt; the log says where it happened."""
    async with DeskBench() as bench:
        broken = request("r")
        broken.sampling.grammar.kind = "my secret prompt"

        with caplog.at_level(logging.WARNING):
            bench.desk.handle(bench.session, pb.GatewayMessage(submit_unified=pb.SubmitUnified(request=broken)))
        failed = (await bench.until_heard("failed", "r")).failed

        assert (failed.error, failed.message) == ("ServingError", "the worker failed to carry a message out")
        assert "message.failed kind=submit_unified request_id=r" in caplog.text
        assert "request_from_wire" in caplog.text
        assert "secret" not in caplog.text
        assert bench.desk.num_requests == 0
