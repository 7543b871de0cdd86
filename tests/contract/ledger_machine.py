"""Gateways, workers and heartbeats around a ledger, in any order, against a model that counts request by request."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.admission_log import AdmissionLog
from cluster.ledger import Ledger
from messages.errors import Unavailable
from messages.reservations import Candidate, Need, Reservation
from tests.contract.ledger_places import NEED, POOL, Clock, LedgerPlace

WORKERS = ("a", "b", "c")
ORDERS = (*itertools.permutations(WORKERS), ("a", "b"), ("c", "b"), ("a",))
TOTAL_ROOM = 400
LACKING_COST = 2.5
LONG_S = 1000.0
MAX_LIVES = 8
"""As many as a ledger tells apart."""


Request = tuple[tuple[str, ...], int, int, float]
"""Candidates in order, prefill tokens, KV tokens, TTL in seconds."""
requests = st.tuples(
    st.sampled_from(ORDERS), st.integers(0, 200), st.integers(0, 200), st.sampled_from([1.0, 5.0, LONG_S])
)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a worker said of itself, and which requests that is made of."""

    life: int
    idle_cost: float
    log: AdmissionLog
    running: frozenset[str]
    """Nonces of the requests in the load."""
    admitted: frozenset[str]
    """Nonces of all that have come, of this life."""


@dataclass
class Worker:
    """A worker that runs what reaches it."""

    life: int = 1
    idle_cost: float = 0.0
    arrivals: list[Reservation] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    admitted: set[str] = field(default_factory=set)

    def heartbeat(self) -> Heartbeat:
        log = AdmissionLog(max_beyond=1000)
        for made in self.arrivals:
            log.admit(made.issuer, made.sequence)
        return Heartbeat(
            life=self.life,
            idle_cost=self.idle_cost,
            log=log,
            running=frozenset(self.running),
            admitted=frozenset(self.admitted),
        )


@dataclass
class Made:
    """A reservation in the model."""

    reservation: Reservation
    ends_at_s: float
    is_open: bool = True

    @property
    def life(self) -> int:
        return int(self.reservation.incarnation)


class LedgerMachine(RuleBasedStateMachine):
    """Rule 16: every request counts once, by its reservation or by the heartbeat, until it ends once."""

    def __init__(self, make_place: Callable[[], LedgerPlace], clock: Clock | None) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = clock
        self.place = make_place()
        self.workers = {worker_id: Worker() for worker_id in WORKERS}
        self.heard = [{worker_id: worker.heartbeat() for worker_id, worker in self.workers.items()} for _ in range(2)]
        self.made: dict[str, Made] = {}
        self.known_lives: dict[str, set[int]] = {}
        """Of workers that have been reserved on, the lives that candidates had."""
        self.num_reserved: dict[tuple[str, int], int] = {}
        self.num_nonces = 0
        self.num_released = self.num_expired = self.num_dropped = 0

    @property
    def now_s(self) -> float:
        return 0.0 if self.clock is None else self.clock.now_s

    def open_rows(self, worker_id: str, life: int) -> list[Made]:
        rows = self.made.values()
        return [row for row in rows if row.is_open and (row.reservation.worker_id, row.life) == (worker_id, life)]

    def candidate(self, gateway: int, worker_id: str) -> Candidate:
        heard = self.heard[gateway][worker_id]
        load = sum(self.made[nonce].reservation.prefill_tokens for nonce in heard.running)
        used = sum(self.made[nonce].reservation.kv_tokens for nonce in heard.running)
        return Candidate(
            worker_id=worker_id,
            incarnation=str(heard.life),
            cost=heard.idle_cost + load,
            cost_per_token=1.0,
            cost_per_lacking_token=LACKING_COST,
            room_tokens=TOTAL_ROOM - used,
            admitted=heard.log.admitted(),
        )

    def true_cost(self, gateway: int, worker_id: str, need: Need) -> float:
        """Each request that the heartbeat has or the ledger holds, once; one that came and ended, not at all."""
        heard = self.heard[gateway][worker_id]
        sent = {row.reservation.nonce for row in self.open_rows(worker_id, heard.life)} - heard.admitted
        rows = [self.made[nonce].reservation for nonce in heard.running | sent]
        lacking = max(0, sum(row.kv_tokens for row in rows) + need.kv_tokens - TOTAL_ROOM)
        return heard.idle_cost + sum(row.prefill_tokens for row in rows) + LACKING_COST * lacking

    def end(self, row: Made) -> int:
        was_open, row.is_open = row.is_open, False
        return int(was_open)

    def propose(self, gateway: int, worker_ids: tuple[str, ...]) -> None:
        """Let lives that come up for the first time end what is on others."""
        for worker_id in worker_ids:
            life, known = self.heard[gateway][worker_id].life, self.known_lives.get(worker_id)
            if known and life not in known:
                self.num_dropped += sum(self.end(row) for other in known for row in self.open_rows(worker_id, other))
                known.add(life)

    @rule(gateway=st.integers(0, 1), requests=st.lists(requests, min_size=1, max_size=6))
    def reserve_for(self, gateway: int, requests: list[Request]) -> None:
        for request in requests:
            self.reserve(gateway, *request)

    def reserve(
        self, gateway: int, worker_ids: tuple[str, ...], prefill_tokens: int, kv_tokens: int, ttl_s: float
    ) -> None:
        nonce = f"r/{self.num_nonces}"
        self.num_nonces += 1
        need = Need(prefill_tokens=prefill_tokens, kv_tokens=kv_tokens)
        ttl_s = LONG_S if self.clock is None else ttl_s
        candidates = [self.candidate(gateway, worker_id) for worker_id in worker_ids]
        asked = self.place.gateways[gateway].reserve(POOL, candidates, need, nonce=nonce, ttl_s=ttl_s)
        self.propose(gateway, worker_ids)
        costs = {worker_id: self.true_cost(gateway, worker_id, need) for worker_id in worker_ids}

        made = self.runner.run(asked)

        life = self.heard[gateway][made.worker_id].life
        self.made[nonce] = Made(reservation=made, ends_at_s=self.now_s + ttl_s)
        self.known_lives.setdefault(made.worker_id, set()).add(life)
        numbered = self.num_reserved.get((made.worker_id, life), 0) + 1
        self.num_reserved[made.worker_id, life] = numbered
        assert made.worker_id == min(costs, key=costs.__getitem__), costs
        assert (made.incarnation, made.prefill_tokens, made.kv_tokens) == (str(life), prefill_tokens, kv_tokens)
        assert made.sequence == numbered

    @precondition(lambda self: self.made)
    @rule(gateway=st.integers(0, 1), data=st.data())
    def reserve_again(self, gateway: int, data: st.DataObject) -> None:
        row = self.pick(data)
        if row.ends_at_s <= self.now_s:
            return
        need = Need(prefill_tokens=7, kv_tokens=7)
        candidates = [self.candidate(gateway, worker_id) for worker_id in WORKERS]

        again = self.runner.run(
            self.place.gateways[gateway].reserve(POOL, candidates, need, nonce=row.reservation.nonce, ttl_s=1.0)
        )

        assert again == row.reservation

    @precondition(lambda self: self.made)
    @rule(gateway=st.integers(0, 1), data=st.data())
    def release(self, gateway: int, data: st.DataObject) -> None:
        row = self.pick(data)

        ended = self.runner.run(self.place.gateways[gateway].release(POOL, row.reservation.nonce))

        assert ended is row.is_open
        self.num_released += self.end(row)

    @rule(gateway=st.integers(0, 1))
    def release_before_it_is_reserved(self, gateway: int) -> None:
        nonce = f"r/{self.num_nonces}"
        self.num_nonces += 1
        mine, other = self.place.gateways[gateway], self.place.gateways[1 - gateway]
        candidates = [self.candidate(gateway, worker_id) for worker_id in WORKERS]

        assert self.runner.run(mine.release(POOL, nonce)) is False
        with pytest.raises(Unavailable):
            self.runner.run(other.reserve(POOL, candidates, NEED, nonce=nonce, ttl_s=LONG_S))

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        made = self.pick(data).reservation
        self.workers[made.worker_id].running.discard(made.nonce)

    @rule(
        gateway=st.integers(0, 1),
        worker_ids=st.sampled_from(ORDERS),
        idle_cost=st.integers(0, 50),
        arriving=st.lists(st.integers(0, 5), max_size=5),
    )
    def hear(self, gateway: int, worker_ids: tuple[str, ...], idle_cost: int, arriving: list[int]) -> None:
        """Requests reach their workers in any order, even after their reservations have ended; then a gateway hears."""
        self.workers[worker_ids[0]].idle_cost = idle_cost
        for worker_id in worker_ids:
            for place in arriving:
                self.arrive(worker_id, place)
            self.heard[gateway][worker_id] = self.workers[worker_id].heartbeat()

    def arrive(self, worker_id: str, place: int) -> None:
        worker = self.workers[worker_id]
        sent = [
            row.reservation
            for nonce, row in self.made.items()
            if (row.reservation.worker_id, row.life) == (worker_id, worker.life) and nonce not in worker.admitted
        ]
        for made in sent[place : place + 1]:
            worker.arrivals.append(made)
            worker.admitted.add(made.nonce)
            worker.running.add(made.nonce)

    @rule(worker_id=st.sampled_from(WORKERS))
    def restart(self, worker_id: str) -> None:
        life = self.workers[worker_id].life + 1
        if life <= MAX_LIVES:
            self.workers[worker_id] = Worker(life=life)

    @rule(gateway=st.integers(0, 1), worker_id=st.sampled_from(WORKERS))
    def forget(self, gateway: int, worker_id: str) -> None:
        life = self.heard[gateway][worker_id].life
        ended = self.runner.run(self.place.gateways[gateway].forget(POOL, worker_id, str(life)))

        rows = self.open_rows(worker_id, life)
        assert ended == len(rows)
        self.num_dropped += sum(self.end(row) for row in rows)

    @precondition(lambda self: self.clock is not None)
    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def let_time_pass(self, seconds: float) -> None:
        assert self.clock is not None
        self.clock.now_s += seconds
        self.num_expired += sum(self.end(row) for row in self.made.values() if row.ends_at_s <= self.now_s)

    @invariant()
    def both_gateways_see_what_is_open(self) -> None:
        live = {row.reservation.nonce: row.reservation for row in self.made.values() if row.is_open}
        for ledger in self.place.gateways:
            rows = self.runner.run(ledger.pending(POOL))
            assert len(rows) == len(live)
            assert {row.nonce: row for row in rows} == live
            assert ledger.num_open == len(live)

    def teardown(self) -> None:
        ledgers = list({id(ledger): ledger for ledger in self.place.gateways}.values())
        try:
            self.end_all(ledgers)
        finally:
            for ledger in (*ledgers, self.place.elsewhere):
                self.runner.run(ledger.close())
            self.runner.close()

    def end_all(self, ledgers: list[Ledger]) -> None:
        for row in self.made.values():
            ended = self.runner.run(self.place.ledger.release(POOL, row.reservation.nonce))
            assert ended is row.is_open
            self.num_released += self.end(row)
        self.both_gateways_see_what_is_open()
        assert sum(ledger.num_released for ledger in ledgers) == self.num_released
        assert sum(ledger.num_expired for ledger in ledgers) == self.num_expired
        assert sum(ledger.num_dropped for ledger in ledgers) == self.num_dropped
        assert self.num_released + self.num_expired + self.num_dropped == len(self.made)

    def pick(self, data: st.DataObject) -> Made:
        return self.made[data.draw(st.sampled_from(sorted(self.made)))]
