"""Requests are placed on live workers, and what they hold there is given back exactly once."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from cluster.memory_ledger import MemoryLedger
from cluster.placement import PlacementRules
from cluster.pool_board import SpillRules
from cluster.pools import PoolSpec
from deployments import dispatcher
from deployments.dispatcher import Ask, Dispatcher, DispatchRules, Sent
from deployments.fleet import Fleet
from deployments.worker_links import WorkerLink
from kv_store.registry.protocol import WorkerRecord
from messages.errors import Unavailable
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.v1 import worker_pb2 as pb
from telemetry.metrics import GatewayMetrics

POOLS = (PoolSpec(name="prefill", role="prefill"), PoolSpec(name="decode", role="decode"))
RULES = DispatchRules(placement=PlacementRules(local_prefill_max_tokens=32), long_prefill_tokens=2048)


class Workers:
    """Links without sockets, and the page that shows them."""

    def __init__(self, **pools: str) -> None:
        self.links = {worker_id: make_link(worker_id, pool) for worker_id, pool in pools.items()}

    def live(self) -> list[WorkerLink]:
        return list(self.links.values())

    def samples(self) -> list[object]:
        return []

    def heartbeat(self, worker_id: str, **fields: object) -> None:
        load = pb.Load()
        load.CopyFrom(self.links[worker_id].load or pb.Load())
        load.MergeFrom(pb.Load(**fields))  # type: ignore[arg-type]
        self.links[worker_id].load = load


def make_link(worker_id: str, pool: str, incarnation: str = "1") -> WorkerLink:
    record = WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        address="here",
        pool=pool,
        role=pool,
        model="m",
        fingerprint="f",
        block_size=16,
        key_model="m",
        key_codec="raw",
        context_length=8192,
    )
    link = WorkerLink(record, "g", 6.0, is_up=True)
    link.welcome = pb.Welcome(worker_id=worker_id, step_tokens=512, chunk_tokens=256)
    link.load = pb.Load(groups=[pb.GroupLoad(name="full", total_blocks=1000, free_blocks=1000)])
    return link


def make_dispatcher(workers: Workers, ledger: MemoryLedger | None = None) -> tuple[Dispatcher, MemoryLedger]:
    ledger = ledger or MemoryLedger()
    fleet = Fleet(workers, POOLS, SpillRules())
    return Dispatcher(fleet, ledger, RULES, GatewayMetrics(workers)), ledger  # type: ignore[arg-type]


def ask(name: str, prompt_tokens: int = 1000, **more: object) -> Ask:
    request = GenerationRequest(
        request_id=RequestId(name),
        model="m",
        prompt_token_ids=(1,) * prompt_tokens,
        sampling=SamplingParams(max_tokens=100),
        timeout_s=60.0,
    )
    return Ask(request=request, nonce=name, **({"hits": {}} | more))  # type: ignore[arg-type]


async def everything_released(dispatcher_: Dispatcher, ledger: MemoryLedger) -> bool:
    await dispatcher_.close()
    return ledger.num_open == 0


async def test_a_long_prompt_is_computed_elsewhere_and_both_workers_are_reserved() -> None:
    dispatching, ledger = make_dispatcher(Workers(p1="prefill", d1="decode"))

    sent = await dispatching.send(ask("r"))

    assert (sent.decode, sent.prefill, sent.uncached_tokens) == ("d1", "p1", 1000)
    assert {role: row.prefill_tokens for role, row in sent.reservations.items()} == {"decode": 0, "prefill": 1000}
    assert [row.kv_tokens for row in await ledger.pending("decode")] == [1100]
    dispatching.release(*sent.reservations.values())
    assert await everything_released(dispatching, ledger)


@pytest.mark.parametrize(("uncached", "is_local"), [(1, True), (31, True), (32, True), (33, False)])
@pytest.mark.parametrize("cached", [0, 960])
async def test_a_short_rest_of_a_prompt_is_computed_where_it_decodes(
    uncached: int, is_local: bool, cached: int
) -> None:
    """Case 65: the boundary is strict."""
    dispatching, _ = make_dispatcher(Workers(p1="prefill", d1="decode"))

    sent = await dispatching.send(ask("r", cached + uncached, hits={"d1": cached, "p1": cached}))

    assert (sent.prefill is None) == is_local
    assert sent.max_uncached_tokens == (32 if is_local else None)


async def test_a_burst_between_two_heartbeats_is_spread() -> None:
    """Case 61: 8 simultaneous prompts to 4 workers, 2 each, although no heartbeat tells of any."""
    workers = Workers(**{f"p{n}": "prefill" for n in range(4)}, **{f"d{n}": "decode" for n in range(4)})
    ledger = MemoryLedger()
    gateways = [make_dispatcher(workers, ledger)[0] for _ in range(2)]

    sent = await asyncio.gather(*(gateways[n % 2].send(ask(f"r{n}", 8000)) for n in range(8)))

    assert Counter(each.prefill for each in sent) == dict.fromkeys(("p0", "p1", "p2", "p3"), 2)
    assert Counter(each.decode for each in sent) == dict.fromkeys(("d0", "d1", "d2", "d3"), 2)


async def test_what_a_heartbeat_counts_is_not_counted_again() -> None:
    workers = Workers(p1="prefill", p2="prefill", d1="decode")
    dispatching, _ = make_dispatcher(workers)
    first = await dispatching.send(ask("first", 4000))
    assert first.prefill is not None
    held = first.reservations["prefill"]
    admitted = [pb.Admitted(issuer=held.issuer, through=held.sequence)]
    other = "p2" if first.prefill == "p1" else "p1"

    # The first worker has computed nearly all of it; were the reservation counted too, the other one would be better.
    workers.heartbeat(first.prefill, queued_prefill_tokens=10, admitted=admitted)
    workers.heartbeat(other, queued_prefill_tokens=2000)
    second = await dispatching.send(ask("second", 4000))

    assert second.prefill == first.prefill


async def test_avoided_and_vanished_workers_get_nothing() -> None:
    workers = Workers(p1="prefill", p2="prefill", d1="decode", d2="decode")
    dispatching, _ = make_dispatcher(workers)

    avoiding = await dispatching.send(ask("a", avoided=frozenset({"p1", "d1"})))
    del workers.links["d2"]
    after = await dispatching.send(ask("b"))

    assert (avoiding.prefill, avoiding.decode) == ("p2", "d2")
    assert after.decode == "d1"


@pytest.mark.parametrize("left", [{"p1": "prefill"}, {"d1": "decode"}, {}])
async def test_without_a_worker_for_either_part_a_request_is_refused_and_nothing_stays_reserved(
    left: dict[str, str],
) -> None:
    dispatching, ledger = make_dispatcher(Workers(**left))

    with pytest.raises(Unavailable):
        await dispatching.send(ask("r"))

    assert await everything_released(dispatching, ledger)
    assert not dispatching.can_place()


async def test_a_worker_that_goes_while_the_ledger_is_asked_is_not_used() -> None:
    workers = Workers(p1="prefill", d1="decode", d2="decode")

    class Slow(MemoryLedger):
        async def reserve(self, *args: object, **more: object):  # type: ignore[no-untyped-def, override]
            reservation = await super().reserve(*args, **more)  # type: ignore[arg-type]
            if reservation.pool == "decode" and len(workers.links) > 2:
                del workers.links[reservation.worker_id]
            dispatching.fleet.refresh()
            return reservation

    dispatching, ledger = make_dispatcher(workers, Slow())

    sent = await dispatching.send(ask("r"))

    assert sent.decode in workers.links
    dispatching.release(*sent.reservations.values())
    assert await everything_released(dispatching, ledger)


async def test_a_reservation_ends_once_its_worker_has_been_heard_or_with_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "HEARD_S", 0.02)
    dispatching, ledger = make_dispatcher(Workers(p1="prefill", d1="decode"))
    sent = await dispatching.send(ask("r"))

    dispatching.release_soon(sent.reservations["prefill"])
    await asyncio.sleep(0.05)
    halfway = ledger.num_open
    dispatching.release(*sent.reservations.values())
    await asyncio.sleep(0.01)

    assert halfway == 1
    assert ledger.num_open == 0
    assert ledger.num_released == 2


async def test_a_cancelled_placement_keeps_no_reservation() -> None:
    class Stuck(MemoryLedger):
        async def reserve(self, pool: str, *args: object, **more: object):  # type: ignore[no-untyped-def, override]
            if pool == "prefill":
                await asyncio.sleep(60)
            return await super().reserve(pool, *args, **more)  # type: ignore[arg-type]

    dispatching, ledger = make_dispatcher(Workers(p1="prefill", d1="decode"), Stuck())
    sending = asyncio.create_task(dispatching.send(ask("r")))
    await asyncio.sleep(0.01)

    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending

    assert await everything_released(dispatching, ledger)


async def test_explaining_reserves_nothing_and_names_what_would_be_chosen() -> None:
    dispatching, ledger = make_dispatcher(Workers(p1="prefill", p2="prefill", d1="decode"))

    explanation = dispatching.explain(ask("r", hits={"p2": 900}))
    sent: Sent = await dispatching.send(replace(ask("r"), hits={"p2": 900}))

    assert explanation.prefill is not None
    assert explanation.decode.candidates[0].worker_id == sent.decode
    assert explanation.prefill.candidates[0].worker_id == sent.prefill == "p2"
    assert ledger.num_open == 2


async def test_another_prefill_worker_computes_under_the_same_decode_reservation() -> None:
    workers = Workers(p1="prefill", p2="prefill", d1="decode", d2="decode")
    dispatching, ledger = make_dispatcher(workers)
    first = await dispatching.send(ask("r"))
    assert first.prefill is not None
    kept = first.reservations["decode"]

    second = await dispatching.send(ask("r2", avoided=frozenset({first.prefill}), kept=kept))

    assert second.reservations["decode"] == kept
    assert (second.decode, second.prefill) == (first.decode, "p2" if first.prefill == "p1" else "p1")
    assert [row.nonce for row in await ledger.pending("decode")] == [kept.nonce]


async def test_a_placement_that_fails_leaves_a_kept_reservation_to_its_giver() -> None:
    workers = Workers(p1="prefill", d1="decode")
    dispatching, ledger = make_dispatcher(workers)
    kept = (await dispatching.send(ask("r"))).reservations["decode"]

    with pytest.raises(Unavailable):
        await dispatching.send(ask("r2", avoided=frozenset({"p1"}), kept=kept))
    await dispatching.close()

    assert kept in await ledger.pending("decode")


async def test_a_kept_reservation_on_a_worker_that_is_gone_or_avoided_is_not_used() -> None:
    workers = Workers(p1="prefill", d1="decode", d2="decode")
    dispatching, _ = make_dispatcher(workers)
    kept = (await dispatching.send(ask("r"))).reservations["decode"]
    other = "d2" if kept.worker_id == "d1" else "d1"

    avoided = await dispatching.send(ask("r2", avoided=frozenset({kept.worker_id}), kept=kept))
    workers.links[kept.worker_id] = make_link(kept.worker_id, "decode", incarnation="2")
    reborn = await dispatching.send(ask("r3", kept=kept))

    assert avoided.decode == other
    assert reborn.reservations["decode"].nonce != kept.nonce
