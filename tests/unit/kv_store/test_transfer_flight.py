import asyncio

import numpy as np
import pytest

from kv_store.transfer.flight import Flight, Piece
from messages.errors import PeerUnreachable, TransferError, TransferTimeout

EMPTY = np.zeros((1, 3), dtype=np.uint64)


class ScriptedAgent:
    """Gives each posted handle the states that the test wrote down."""

    def __init__(self, *, first: list[str], later: dict[int, list[str]] | None = None, refusals: int = 0) -> None:
        self._first = first
        self._later = later or {}
        self._refusals = refusals
        self.num_posted = 0
        self.released: list[object] = []

    def post(self, peer: str, piece: Piece) -> tuple[object, str]:
        if self._first[self.num_posted] == "raise":
            raise TransferError("refused", agent_name=peer, rows=len(piece.local))
        self.num_posted += 1
        return self.num_posted - 1, self._first[self.num_posted - 1]

    def state(self, handle: object) -> str:
        assert isinstance(handle, int)
        states = self._later[handle]
        return states.pop(0) if len(states) > 1 else states[0]

    def release(self, handle: object) -> bool:
        self._refusals -= 1
        if self._refusals >= 0:
            return False
        self.released.append(handle)
        return True


def flight_of(num_pieces: int) -> Flight:
    piece = Piece(local=EMPTY, remote=EMPTY, is_remote_device=False)
    return Flight("p", [piece] * num_pieces, asyncio.get_running_loop())


async def settled(flight: Flight) -> TransferError | None:
    await asyncio.wait_for(flight.quiet, 1)
    return flight.outcome.result()


async def test_a_read_that_is_done_when_posted_is_over_at_once() -> None:
    agent, flight = ScriptedAgent(first=["DONE"]), flight_of(1)

    assert flight.advance(agent)

    assert await settled(flight) is None
    assert agent.released == [0]


async def test_pieces_are_posted_one_per_turn_and_all_must_arrive() -> None:
    agent = ScriptedAgent(first=["PROC", "DONE", "PROC"], later={0: ["PROC", "DONE"], 2: ["PROC", "PROC", "DONE"]})
    flight = flight_of(3)

    turns = [flight.advance(agent) for _ in range(6)]

    assert turns.index(True) == 4
    assert await settled(flight) is None
    assert sorted(agent.released, key=str) == [0, 1, 2]


async def test_a_read_that_was_given_up_is_quiet_only_when_it_has_left_proc() -> None:
    agent, flight = ScriptedAgent(first=["PROC"], later={0: ["PROC", "PROC", "PROC", "DONE"]}), flight_of(1)
    assert not flight.advance(agent)

    flight.give_up(TransferTimeout("late"))
    assert not flight.advance(agent)
    assert agent.released == []
    assert not flight.quiet.done()
    assert not flight.advance(agent)

    assert flight.advance(agent)
    assert isinstance(await settled(flight), TransferTimeout)
    assert agent.released == [0]


async def test_giving_up_posts_no_further_piece() -> None:
    agent, flight = ScriptedAgent(first=["DONE", "DONE"]), flight_of(2)
    flight.advance(agent)

    flight.give_up(TransferTimeout("late"))

    assert flight.advance(agent)
    assert agent.num_posted == 1
    assert isinstance(await settled(flight), TransferTimeout)


async def test_a_failed_piece_fails_the_read_after_the_others_are_over() -> None:
    agent = ScriptedAgent(first=["PROC", "PROC"], later={0: ["PROC", "ERR"], 1: ["PROC", "PROC", "ERR"]})
    flight = flight_of(3)
    flight.advance(agent)

    turns = [flight.advance(agent) for _ in range(4)]

    assert turns[0] is False
    assert True in turns
    assert isinstance(await settled(flight), PeerUnreachable)
    assert agent.num_posted == 2


async def test_a_piece_that_cannot_be_posted_fails_the_read() -> None:
    agent, flight = ScriptedAgent(first=["DONE", "raise"]), flight_of(2)
    flight.advance(agent)

    assert flight.advance(agent)

    failure = await settled(flight)
    assert failure is not None
    assert failure.message == "refused"


async def test_a_handle_that_cannot_be_released_is_tried_again() -> None:
    agent, flight = ScriptedAgent(first=["DONE"], refusals=2), flight_of(1)

    assert not flight.advance(agent)
    assert not flight.advance(agent)
    assert flight.advance(agent)

    assert agent.released == [0]
    assert await settled(flight) is None


async def test_a_closed_transport_tells_the_reader_but_never_calls_the_destination_quiet() -> None:
    agent, flight = ScriptedAgent(first=["PROC"], later={0: ["PROC"]}), flight_of(1)
    flight.advance(agent)

    flight.abandon(PeerUnreachable("closed"))
    await asyncio.sleep(0)

    assert isinstance(flight.outcome.result(), PeerUnreachable)
    assert not flight.quiet.done()


def test_a_flight_that_outlives_its_loop_ends_silently() -> None:
    async def make() -> Flight:
        return flight_of(1)

    flight = asyncio.run(make())

    assert flight.advance(ScriptedAgent(first=["DONE"]))
    with pytest.raises(asyncio.InvalidStateError):
        flight.outcome.result()
