"""Case 68: who waits, is refused or goes leaves nothing behind."""

import asyncio

import pytest

from cluster.admission import Admission, AdmissionRules, Ask
from deployments.gateway.waiting_line import WaitingLine
from messages.errors import DeadlineExceeded, Overloaded, Unavailable


def make() -> WaitingLine:
    loop = asyncio.get_running_loop()
    return WaitingLine(Admission(AdmissionRules(max_requests=100, max_waiting_tokens=490), 10, loop.time))


async def request(line: WaitingLine, name: str, gate: asyncio.Event, timeout_s: float | None = None) -> None:
    async with line.place(Ask(request_id=name, tokens=10, timeout_s=timeout_s)):
        await gate.wait()


async def test_fifty_refused_and_fifty_cancelled_leave_nothing() -> None:
    line, gate = make(), asyncio.Event()
    tasks = [asyncio.create_task(request(line, str(n), gate)) for n in range(100)]
    await asyncio.sleep(0.01)
    refused = [t for t in tasks if t.done()]
    assert len(refused) == 50
    assert all(isinstance(t.exception(), Overloaded) for t in refused)
    for t in tasks:
        t.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    a = line.admission
    assert (a.num_running, a.num_waiting, a.running_tokens, a.waiting_tokens, line._turns) == (0, 0, 0, 0, {})


async def test_turns_deadlines_and_lost_workers() -> None:
    line, gate = make(), asyncio.Event()
    first = asyncio.create_task(request(line, "a", gate))
    second = asyncio.create_task(request(line, "b", gate))
    late = asyncio.create_task(request(line, "c", gate, timeout_s=0.02))
    await asyncio.sleep(0.05)
    assert isinstance(late.exception(), DeadlineExceeded)
    assert line.admission.num_waiting == 1
    gate.set()
    await asyncio.gather(first, second)
    gate.clear()
    first, second = (asyncio.create_task(request(line, n, gate)) for n in "de")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    line.tell(line.admission.set_budget(0))
    with pytest.raises(Unavailable):
        await second
    gate.set()
    await first
    assert line.admission.running_tokens == 0
