"""What a worker says about its blocks becomes true again after every kind of loss."""

from collections.abc import Iterable, Mapping, Sequence

from kv_store.registry.memory import MemoryRegistry
from kv_store.registry.protocol import Claimant, ShardMemory, Tier, WorkerRecord
from kv_store.registry.publisher import BlockPublisher, PublishLimits
from messages.handoff import BlockKey

LIMITS = PublishLimits(batch_size=8, resync_batch_size=4, max_pending=32, num_withdrawn_kept=8, bulk=6)


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "big")) for number in numbers]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Ledger(MemoryRegistry):
    """A registry that keeps a list of the batches that it was given."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.batches: list[dict[BlockKey, Tier | None]] = []

    async def write(
        self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
    ) -> ShardMemory | None:
        if not self.is_silent:
            self.batches.append(dict(changes))
        return await super().write(shard, claimant, changes, sequence)


class Bench:
    """A publisher of worker "a", its registry, and the lease that it renews by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.registry = Ledger(self.clock)
        self.publisher = BlockPublisher(
            self.registry, Claimant(worker_id="a", incarnation="life-1"), LIMITS, self.clock
        )

    async def renew(self, lease_s: float = 1e9) -> None:
        expected = self.publisher.expect()
        self.publisher.check(await self.registry.register(self.record, lease_s=lease_s), expected, lease_s)

    async def flush(self) -> None:
        while self.publisher.has_work:
            await self.publisher.flush()

    async def held(self, asked: Sequence[BlockKey]) -> list[bool]:
        return [(await self.registry.lookup([key])).by_worker == {"a": 1} for key in asked]

    async def held_by_life(self, asked: Sequence[BlockKey]) -> list[bool]:
        """As `held`, when the worker is listed."""
        await self.registry.register(self.record, lease_s=1e9)
        return await self.held(asked)

    async def hold(self, stored: Iterable[BlockKey], removed: Iterable[BlockKey] = ()) -> None:
        self.publisher.note(stored, removed)
        await self.flush()

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id="a",
            incarnation="life-1",
            address="127.0.0.1:1",
            pool="p",
            role="unified",
            model="tiny",
            fingerprint="f",
            block_size=32,
            key_model="m",
            key_codec="c",
            context_length=100,
            generation=self.publisher.claimant.generation,
        )


async def test_what_is_noted_is_found_and_what_is_given_up_is_not() -> None:
    bench = Bench()
    await bench.renew()

    await bench.hold(keys(*range(20)))
    await bench.hold((), keys(3, 4))

    assert await bench.held(keys(*range(20))) == [number not in (3, 4) for number in range(20)]
    assert max(map(len, bench.registry.batches)) == LIMITS.batch_size


async def test_a_block_that_came_back_before_it_was_sent_is_held() -> None:
    bench = Bench()
    await bench.renew()

    bench.publisher.note(keys(1), ())
    bench.publisher.note((), keys(1))
    await bench.hold(keys(1))

    assert await bench.held(keys(1)) == [True]
    assert bench.registry.batches == [dict.fromkeys(keys(1), "device")]


async def test_a_store_that_failed_is_never_seen() -> None:
    """Rule 7, case 33: a block is said to be held only when it is complete; blocks 0 to 2 are, 3 failed."""
    bench = Bench()
    await bench.renew()

    await bench.hold(keys(0, 1, 2, 4))

    assert (await bench.registry.lookup(keys(0, 1, 2, 3, 4))).by_worker == {"a": 3}


async def test_a_shard_that_forgot_everything_is_filled_again_after_one_renewal() -> None:
    """Rule 10: the epoch has changed."""
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(*range(20)))
    await bench.hold((), keys(0))
    bench.registry.forget()

    await bench.renew()
    await bench.flush()

    assert await bench.held(keys(*range(20))) == [False] + [True] * 19
    assert (bench.publisher.counts.epoch_changes, bench.publisher.counts.resyncs) == (1, 1)
    assert bench.publisher.counts.gaps == 0


async def test_a_write_notices_a_shard_that_forgot_too() -> None:
    """Rule 10."""
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(*range(10)))
    bench.registry.forget()

    await bench.hold(keys(10))

    assert await bench.held_by_life(keys(*range(11))) == [True] * 11
    assert bench.publisher.counts.resyncs == 1


async def test_claims_made_before_the_life_was_listed_again_are_made_again() -> None:
    """Rules 7 and 10: the shard lost its worker table too, so its leader takes them for a dead one's."""
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(*range(10)))
    bench.registry.forget()
    await bench.hold(keys(10))
    await bench.registry.tend()

    await bench.renew()
    await bench.flush()

    assert await bench.held(keys(*range(11))) == [True] * 11


async def test_a_shard_is_filled_in_small_batches() -> None:
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(*range(20)))
    bench.registry.forget()
    bench.registry.batches.clear()
    await bench.renew()

    await bench.publisher.flush()
    after_one = len(bench.registry.batches)
    await bench.flush()

    assert after_one == 1
    assert [len(batch) for batch in bench.registry.batches] == [LIMITS.resync_batch_size] * 5


async def test_a_shard_that_lost_its_last_writes_hears_them_again() -> None:
    """Rule 11: a stale replica remembers an older batch under the same epoch; what was given up since is not held."""
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(1, 2))
    stale = {key: dict(row) for key, row in bench.registry._holders.items()}
    sequences = dict(bench.registry._sequences)
    await bench.hold(keys(3), keys(1))
    bench.registry._holders = stale
    bench.registry._sequences = sequences
    assert await bench.held(keys(1, 2, 3)) == [True, True, False]

    await bench.renew()
    await bench.flush()

    assert await bench.held(keys(1, 2, 3)) == [False, True, True]
    assert (bench.publisher.counts.gaps, bench.publisher.counts.resyncs) == (1, 1)
    await bench.renew()
    assert bench.publisher.counts.gaps == 1


async def test_what_a_silent_shard_should_know_waits_in_its_newest_state() -> None:
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(1, 2))
    bench.registry.is_silent = True
    bench.publisher.note(keys(3, 4), keys(1))
    await bench.publisher.flush()
    bench.publisher.note((), keys(4))
    await bench.publisher.flush()
    assert bench.publisher.queue_depth > 0

    bench.registry.is_silent = False
    bench.clock.now_s += LIMITS.retry_s
    await bench.flush()

    assert await bench.held(keys(1, 2, 3, 4)) == [False, True, True, False]
    assert bench.publisher.counts.resyncs == 0


async def test_a_silent_shard_is_left_alone_for_a_moment() -> None:
    bench = Bench()
    await bench.renew()
    bench.registry.is_silent = True
    bench.publisher.note(keys(1), ())
    await bench.publisher.flush()
    bench.registry.is_silent = False

    await bench.publisher.flush()
    early = await bench.held(keys(1))
    bench.clock.now_s += LIMITS.retry_s
    await bench.publisher.flush()

    assert (early, await bench.held(keys(1))) == ([False], [True])


async def test_past_the_bound_everything_is_said_again_under_a_new_generation() -> None:
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(*range(5)))
    bench.registry.is_silent = True
    is_new = False
    for number in range(5, 60):
        is_new |= bench.publisher.note(keys(number), keys(number - 1))
        await bench.publisher.flush()
    waiting = bench.publisher.queue_depth

    bench.registry.is_silent = False
    bench.clock.now_s += LIMITS.retry_s
    await bench.renew()
    await bench.flush()

    assert is_new
    assert waiting <= 2 * LIMITS.max_pending
    assert bench.publisher.claimant.generation >= 1
    assert await bench.held(keys(*range(60))) == [number in (0, 1, 2, 3, 59) for number in range(60)]


async def test_a_clear_is_one_step_and_what_is_left_is_said_again() -> None:
    """Rule 11: no write per block that is gone."""
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(*range(20)))
    bench.registry.batches.clear()

    is_new = bench.publisher.note((), keys(*range(2, 20)))
    await bench.renew()
    gone_at_once = await bench.held(keys(*range(20)))
    await bench.flush()

    assert is_new
    assert gone_at_once == [False] * 20
    assert await bench.held(keys(*range(20))) == [True, True] + [False] * 18
    assert bench.registry.batches == [dict.fromkeys(keys(0, 1), "device")]


async def test_a_small_removal_is_no_clear() -> None:
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(*range(20)))

    is_new = bench.publisher.note((), keys(*range(8)))

    assert not is_new
    assert bench.publisher.claimant.generation == 0


async def test_a_batch_under_way_during_a_clear_does_not_come_back() -> None:
    bench = Bench()
    await bench.renew()
    bench.registry.is_silent = True
    bench.publisher.note(keys(*range(7)), ())
    sent = bench.publisher.flush()

    class ClearsWhileItIsAsked(Ledger):
        async def write(
            self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
        ) -> ShardMemory | None:
            bench.publisher.note((), keys(*range(7)))
            return None

    bench.registry.__class__ = ClearsWhileItIsAsked
    await sent
    bench.registry.__class__ = Ledger
    bench.registry.is_silent = False
    bench.clock.now_s += LIMITS.retry_s
    await bench.renew()
    await bench.flush()

    assert bench.publisher.claimant.generation == 1
    assert await bench.held(keys(*range(7))) == [False] * 7


async def test_a_worker_whose_lease_lapsed_says_everything_again() -> None:
    """Rule 7: while it was away its claims may have been cleaned up."""
    bench = Bench()
    await bench.renew(lease_s=1.0)
    await bench.hold(keys(1, 2))
    bench.clock.now_s += 2.0
    await bench.registry.tend()

    await bench.renew()
    await bench.flush()

    assert await bench.held(keys(1, 2)) == [True, True]
    assert bench.publisher.counts.resyncs == 1


async def test_a_lapsed_lease_is_noticed_when_the_answer_that_told_of_it_is_lost() -> None:
    """Rule 7."""
    bench = Bench()
    await bench.renew(lease_s=1.0)
    await bench.hold(keys(1, 2))
    bench.clock.now_s += 2.0
    await bench.registry.tend()
    await bench.registry.register(bench.record, lease_s=1.0)

    bench.clock.now_s += 0.5
    await bench.renew(lease_s=1.0)
    await bench.flush()
    bench.clock.now_s += 0.9
    await bench.renew(lease_s=1.0)

    assert await bench.held(keys(1, 2)) == [True, True]
    assert bench.publisher.counts.resyncs == 1
    assert not bench.publisher.has_work


async def test_claims_are_renewed_before_they_end_and_only_while_held() -> None:
    """Rule 7: the time to live is for the dead."""
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(1, 2))
    bench.clock.now_s = 40.0
    await bench.hold(keys(3), keys(2))
    bench.registry.batches.clear()

    bench.clock.now_s = 49.0
    bench.publisher.refresh(entry_ttl_s=100.0)
    early = bench.publisher.has_work
    bench.clock.now_s = 51.0
    bench.publisher.refresh(entry_ttl_s=100.0)
    await bench.flush()
    bench.publisher.refresh(entry_ttl_s=100.0)

    assert not early
    assert bench.registry.batches == [dict.fromkeys(keys(1), "device")]
    assert not bench.publisher.has_work


async def test_a_pause_follows_a_batch_that_is_said_again() -> None:
    bench = Bench()
    await bench.renew()
    await bench.hold(keys(1))
    bench.registry.forget()
    await bench.renew()

    class Slow(Ledger):
        async def write(
            self, shard: str, claimant: Claimant, changes: Mapping[BlockKey, Tier | None], sequence: int
        ) -> ShardMemory | None:
            bench.clock.now_s += 0.25
            return await super().write(shard, claimant, changes, sequence)

    bench.registry.__class__ = Slow

    assert await bench.publisher.flush() == LIMITS.pause_factor * 0.25
