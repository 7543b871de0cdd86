"""Hand-offs whose messages the test carries itself, so that it can say what each worker calls a request, and when."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.pools import Role
from deployments.worker_links import Exchange, Source
from messages.errors import ServingError
from messages.requests import RequestId
from messages.v1 import worker_pb2 as pb
from messages.wire import request_to_wire, tokens_from_wire
from tests.integration.worker_group import WorkerGroup
from tests.integration.worker_pair import golden, prompt, save_tiny_model

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class Carrier:
    """One request, prefilled by one worker and decoded by another."""

    group: WorkerGroup
    prompt: list[int]
    max_tokens: int = 12
    tokens: list[int] = field(default_factory=list)
    done: pb.WorkDone = field(default_factory=pb.WorkDone)
    exchanges: dict[Source, Exchange] = field(default_factory=dict)

    def begin(self, source: Source, worker_id: str, request_id: str) -> Exchange:
        """A conversation with one worker about the request under this name; none with any other."""
        exchange = self.exchanges[source] = self.group.router.exchange(RequestId(request_id))
        exchange.join(source, self.group.router.link(worker_id))
        return exchange

    def finish(self) -> None:
        """Nobody has anything left to do for it."""
        for source, exchange in self.exchanges.items():
            exchange.finish(source)

    def message(self, exchange: Exchange) -> pb.Request:
        return request_to_wire(self.group.request(self.prompt, self.max_tokens, exchange.request_id))

    async def prefill(self, exchange: Exchange) -> pb.Handoff:
        """Compute the prompt up to token 1; gives the offer of its blocks."""
        submit = pb.SubmitPrefill(request=self.message(exchange))
        exchange.send("prefill", pb.GatewayMessage(submit_prefill=submit))
        accepted = (await next_of(exchange, "accepted")).accepted
        self.tokens.extend(tokens_from_wire((await next_of(exchange, "tokens")).tokens).token_ids)
        return accepted.handoff

    async def decode(self, exchange: Exchange, handoff: pb.Handoff) -> None:
        """Read the blocks and go on to the end."""
        prepare = pb.Prepare(request=self.message(exchange), handoff=handoff)
        exchange.send("decode", pb.GatewayMessage(prepare=prepare))
        first = pb.FirstToken(choice=0, token_id=self.tokens[0])
        exchange.send("decode", pb.GatewayMessage(start=pb.Start(request_id=exchange.request_id, first_tokens=[first])))
        is_over = False
        while not is_over:
            event = await next_of(exchange, "tokens", "work_done")
            if event.WhichOneof("body") == "work_done":
                self.done = event.work_done
            else:
                tokens = tokens_from_wire(event.tokens)
                self.tokens.extend(tokens.token_ids)
                is_over = tokens.finish_reason is not None


async def next_of(exchange: Exchange, *kinds: str) -> pb.Event:
    while True:
        event = (await exchange.next()).event
        if isinstance(event, ServingError):
            raise event
        assert event.WhichOneof("body") != "failed", event.failed
        if event.WhichOneof("body") in kinds:
            return event


async def test_a_hand_off_completes_although_the_workers_name_its_request_differently(folder: Path) -> None:
    """Case 21."""
    async with WorkerGroup(folder, {"p": "prefill", "d": "decode"}, block_size=BLOCK) as group, asyncio.timeout(10):
        carrier = Carrier(group, prompt(60))
        prefill = carrier.begin("prefill", "p", "as/the prefill worker:calls it")
        decode = carrier.begin("decode", "d", "as/the decode worker:calls it")

        await carrier.decode(decode, await carrier.prefill(prefill))

        assert carrier.tokens == await golden(folder, prompt(60), 12)
        assert (carrier.done.blocks_moved, carrier.done.computed_prompt_tokens) == (4, 0)
        carrier.finish()
        await group.until_baseline()


async def test_a_prefill_under_pressure_hands_off_all_its_blocks(folder: Path) -> None:
    """Case 23: it is never preempted, however short of blocks its worker is; the request beside it is."""
    roles: dict[str, Role] = {"a": "unified", "d": "decode"}
    # Of 17 blocks the prefill takes 13: its 50 steps leave the other request without room for its 65th token.
    sizes = {"num_blocks": 17, "block_size": BLOCK, "prefill_chunk_tokens": 4}
    async with (
        WorkerGroup(folder, roles, faults="engine.decode_step:delay=0.05@a", **sizes) as group,
        group.submitted("a", prompt(40, seed=1), name="beside", max_tokens=40, end_token_ids=()) as beside,
        asyncio.timeout(30),
    ):
        await group.until(lambda: group.sample("a").running == 1)
        carrier = Carrier(group, prompt(200))
        prefill, decode = carrier.begin("prefill", "a", "p"), carrier.begin("decode", "d", "d")

        handoff = await carrier.prefill(prefill)
        await group.until(lambda: group.counter("a", "preemptions_total") == 1)
        held = group.sample("a").groups[0].referenced
        await carrier.decode(decode, handoff)

        assert held == 13
        assert carrier.tokens == await golden(folder, prompt(200), 12)
        assert (carrier.done.blocks_moved, carrier.done.computed_prompt_tokens) == (13, 0)
        answer, expected = await group.answer(beside), await golden(folder, prompt(40, seed=1), 40)
        assert len(answer.tokens[0]) == 40
        assert answer.tokens[0][: len(expected)] == expected
        carrier.finish()
        await group.until_baseline()
