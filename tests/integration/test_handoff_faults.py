"""Hand-offs between real engines while messages, reads, clocks and workers fail on purpose (rules 1 to 5, 25, 26)."""

from pathlib import Path

import pytest

from messages.errors import TransferError
from tests.integration.worker_pair import BLOCK, WorkerPair, golden, prompt, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


async def is_golden_again(pair: WorkerPair, folder: Path, tokens: list[int]) -> bool:
    """Whether everything is given back and the same request, now partly cached, still gets the same tokens."""
    await pair.until_baseline()
    again, _ = await pair.ask(tokens, max_tokens=12, name="again")
    await pair.until_baseline()
    return again == await golden(folder, tokens, 12)


CHUNKS_APART = "engine.prefill_chunk:delay=0.15@prefill"
"""Chunks of 16 tokens, each long enough that the reader has read the last one before."""

PLANS = {
    "the second read fails": ("transfer.read:error*1+1", 44),
    "every read is slow": ("transfer.read:delay=0.1", 0),
    "every read fails": ("transfer.read:error", 60),
    "bytes of the second read change on their way": ("transfer.read:corrupt*1+1", 36),
    "an Open fails": ("handoff.open:error", 60),
    "an Open comes twice": ("handoff.open:duplicate", 0),
    "heartbeats come twice": ("handoff.heartbeat:duplicate", 0),
    "a Close fails": ("handoff.close:error", 60),
    "a Close comes twice": ("handoff.close:duplicate", 0),
    "a Close comes late": ("handoff.close:delay=0.3", 0),
    "a Close is lost": ("handoff.close:drop*1", 60),
    "a Close comes after the lease": ("handoff.close:delay=3.5,handoff.heartbeat:error", 60),
    "a heartbeat is lost": ("handoff.heartbeat:drop*1", 0),
    "a Release comes twice": ("handoff.release:duplicate,handoff.open:duplicate,transfer.read:error", 60),
    "the owner's clock jumps over the lease": ("clock:skew=60+4@prefill", 60),
    "messages to decode come twice": ("worker.message:duplicate@decode", 0),
    "messages to prefill come twice": ("worker.message:duplicate@prefill", 0),
    "events come twice": ("worker.event:duplicate", 0),
}
"""What is planned, and the prompt tokens of 60 that decode then computes although prefill did."""


@pytest.mark.parametrize("name", PLANS)
async def test_what_fails_costs_a_recompute_at_most_and_no_wrong_token(folder: Path, name: str) -> None:
    """Rules 1 to 5, 25 and 26; cases 8, 32, 34, 36 and 37."""
    plan, recomputed_tokens = PLANS[name]
    async with WorkerPair(folder, lease_s=3.0, faults=f"{CHUNKS_APART},{plan}", handoff={"digest": True}) as pair:
        tokens, _ = await pair.ask(prompt(60), max_tokens=12)

        assert tokens == await golden(folder, prompt(60), 12)
        await pair.until_baseline()
        counters = pair.sample("decode").counters
        assert counters["transfer_recomputed_tokens_total"] == recomputed_tokens
        assert counters["transfer_failures_total"] == bool(recomputed_tokens)
        assert counters["digest_mismatch_total"] == ("change" in name)
        assert counters["handshake_failures_total/unreachable"] == (name == "an Open fails")
        assert await is_golden_again(pair, folder, prompt(60))


@pytest.mark.parametrize("accident", ["transfer.read:error*1", "transfer.read:corrupt*1", "handoff.close:error*1"])
async def test_the_policy_to_fail_ends_the_request_with_an_error_that_may_be_retried(
    folder: Path, accident: str
) -> None:
    """Rule 25."""
    policy = {"on_load_failure": "fail", "digest": True}
    async with WorkerPair(folder, faults=accident, handoff=policy) as pair:
        with pytest.raises(TransferError) as caught:
            await pair.ask(prompt(60), max_tokens=12)

        assert caught.value.retryable
        assert await is_golden_again(pair, folder, prompt(60))


async def test_another_layout_is_a_handshake_error_and_its_bytes_are_never_read(folder: Path) -> None:
    """Rule 13: a miss, not another reading of the same bytes."""
    async with WorkerPair(folder) as pair:
        pair.workers["prefill"]._handoffs.fingerprint = "of another layout"

        tokens, route = await pair.ask(prompt(60), max_tokens=12)

        assert tokens == await golden(folder, prompt(60), 12)
        assert (route.provenance.blocks_moved, route.provenance.decode_computed_tokens) == (0, 60)
        await pair.until_baseline()
        counters = pair.sample("decode").counters
        assert (counters["handshake_failures_total/layout"], counters["transfer_bytes_total"]) == (1, 0)


async def test_a_worker_that_restarts_on_the_same_address_is_a_new_peer(folder: Path) -> None:
    """Cases 2 and 3: bounded registrations, and the next request is right."""
    async with WorkerPair(folder) as pair:
        peers = pair.workers["decode"]._peers
        for life in range(3):
            address = pair.workers["prefill"].address
            tokens, route = await pair.ask(prompt(60, seed=life), max_tokens=8, name=f"life-{life}")
            assert tokens == await golden(folder, prompt(60, seed=life), 8)
            assert route.provenance.prefill_worker == "prefill"
            assert route.provenance.decode_computed_tokens <= BLOCK

            await pair.restart("prefill")
            assert pair.workers["prefill"].address == address
            incarnation = pair.workers["prefill"].describe()["incarnation"]
            await pair.until(lambda now=incarnation: ("prefill", now) in peers._peers and len(peers) == 1)
            await pair.until(lambda: peers._transport.num_peers == 1)
            await pair.until(lambda: pair.router.is_ready() and len(pair.links.live()) == 2)

        await pair.until_baseline()


async def test_request_ids_may_hold_anything(folder: Path) -> None:
    """Cases 21 and 22: what names a transfer is not made from the request's id."""
    names = ("a/b:c___#layer", "ö 你好 \n\t", "x" * 500, "../..", "%00 {}")
    async with WorkerPair(folder) as pair:
        for seed, name in enumerate(names):
            tokens, route = await pair.ask(prompt(40, seed=seed), max_tokens=6, name=name)

            assert tokens == await golden(folder, prompt(40, seed=seed), 6)
            assert route.provenance.blocks_moved == 5
        await pair.until_baseline()


async def test_a_throttled_transfer_exposes_only_its_last_chunk(folder: Path) -> None:
    """Blocks of finished chunks are read while later chunks compute."""
    # 4 chunks of 16 tokens: 16 tokens are 2 blocks of 2 KiB, 0.1 s each at this rate.
    plan = f"{CHUNKS_APART},transfer.read:throttle=0.00004096@decode"
    async with WorkerPair(folder, faults=plan) as pair:
        tokens, route = await pair.ask(prompt(64), max_tokens=8)

        assert tokens == await golden(folder, prompt(64), 8)
        chunk_s = route.provenance.bytes_moved / 0.00004096e9 / 4
        assert route.provenance.transfer_s >= 4 * chunk_s
        assert chunk_s <= route.provenance.exposed_s < 2 * chunk_s
