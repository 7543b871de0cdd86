"""What one worker says about its blocks, kept true on every shard through losses of either side.

The worker knows what it holds; shards only repeat it. So every answer of a shard is compared with what it should
remember (its epoch, the number of the last batch), and a shard that forgot something hears everything again, in small
batches with pauses. What could not be sent waits, the newest state of each block only; past a bound it is dropped and a
new generation takes all older claims away at once.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from kv_store.registry.backoff import Backoff
from kv_store.registry.protocol import Claimant, Registry, ShardMemory, Tier
from messages.handoff import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishLimits:
    """Bounds on what waits and on what goes out at a time."""

    batch_size: int = 512
    """Changes per write."""
    resync_batch_size: int = 128
    """Blocks per write while a shard is filled again, so that lookups get in between."""
    max_pending: int = 1 << 16
    """Changes that may wait for one shard."""
    max_refreshed: int = 1024
    """Old claims renewed per call of `refresh`."""
    num_withdrawn_kept: int = 4096
    """Blocks given up last; a shard that lost some writes hears of them again."""
    bulk: int = 64
    """Removals at a time from which a new generation is considered."""
    retry_s: float = 0.5
    """A shard that did not answer is tried again so much later; so is, at first, a block that no shard keeps."""
    most_retry_s: float = 8.0
    """Blocks that no shard keeps are tried again ever later, but no later than this."""
    pause_factor: float = 4.0
    """While a shard is filled again, it has so many times the time of a batch for others before the next."""


@dataclass(slots=True, kw_only=True)
class _Held:
    tier: Tier
    said_s: float
    """When a shard last heard it, or it was last queued for that."""


@dataclass(slots=True, kw_only=True)
class _ShardTrack:
    """What waits for one shard, and what that shard should remember."""

    pending: dict[BlockKey, Tier | None] = field(default_factory=dict)
    """Newest state; None: held no longer."""
    backlog: dict[BlockKey, None] = field(default_factory=dict)
    """To be said again, in order, each once, if still held."""
    epoch: str | None = None
    acknowledged: int = 0
    """Batch that the shard is known to have."""
    sent: int = 0
    """Newest batch that it may have."""
    retry_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What shards should say to a registration that is about to be sent."""

    asked_s: float
    acknowledged: Mapping[str, int]
    """By shard, the batch that it is known to have."""


@dataclass(slots=True, kw_only=True)
class PublisherCounts:
    """Monotonic counters."""

    resyncs: int = 0
    gaps: int = 0
    """A shard lacked a batch that it had acknowledged."""
    epoch_changes: int = 0


class BlockPublisher:
    """Used from one event loop; `flush` runs in one task, everything else may come between its steps."""

    def __init__(
        self,
        registry: Registry,
        claimant: Claimant,
        limits: PublishLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.claimant = claimant
        self.counts = PublisherCounts()
        self._registry = registry
        self._limits = limits or PublishLimits()
        self._clock = clock
        self._held: dict[BlockKey, _Held] = {}
        """The one said longest ago first."""
        self._withdrawn: dict[BlockKey, None] = {}
        self._unplaced: dict[BlockKey, Tier | None] = {}
        """Changes whose shard has not been asked for yet."""
        self._homeless: dict[BlockKey, Tier | None] = {}
        """Changes of blocks that no shard kept when that was asked."""
        self._again = Backoff(first_s=self._limits.retry_s, most_s=self._limits.most_retry_s)
        """When it is asked again who keeps those."""
        self._tracks: dict[str, _ShardTrack] = {}
        self._listed_s: dict[str, float] = {}
        """When the last registration that each shard confirmed was sent."""
        self._to_fill: set[str] = set()
        self._has_dropped = False
        """Changes are gone that no shard has heard."""
        self._to_refresh: dict[BlockKey, None] = {}
        """Claims to be said again whose shard has not been asked for yet."""

    @property
    def queue_depth(self) -> int:
        """Changes and repetitions that wait to be sent."""
        waiting = sum(len(track.pending) + len(track.backlog) for track in self._tracks.values())
        return waiting + len(self._unplaced) + len(self._homeless) + len(self._to_refresh)

    def note(self, stored: Iterable[BlockKey], removed: Iterable[BlockKey], tier: Tier = "device") -> bool:
        """Take in which complete blocks the worker holds now and which no longer.

        Returns:
            Whether a new generation has begun, which must be registered: so much was removed that it is cheaper to take
            all claims away and to make the few that are left again.
        """
        gone = list(removed)
        for key in stored:
            self._held.pop(key, None)
            self._held[key] = _Held(tier=tier, said_s=self._clock())
            self._withdrawn.pop(key, None)
            self._queue(key, tier)
        for key in gone:
            self._held.pop(key, None)
            self._withdrawn.pop(key, None)
            self._withdrawn[key] = None
            self._queue(key, None)
        for key in list(islice(self._withdrawn, max(0, len(self._withdrawn) - self._limits.num_withdrawn_kept))):
            del self._withdrawn[key]
        if (len(gone) >= self._limits.bulk and len(gone) > len(self._held)) or self._is_over_bound():
            self._begin_generation()
            return True
        return False

    def expect(self) -> Expectation:
        """Return what to compare the answer of a registration with; taken just before it is sent."""
        acknowledged = {shard: track.acknowledged for shard, track in self._tracks.items()}
        return Expectation(asked_s=self._clock(), acknowledged=acknowledged)

    def check(self, memories: Mapping[str, ShardMemory], expected: Expectation, lease_s: float) -> None:
        """Compare what shards said to a registration with what they should remember.

        Args:
            memories: What `Registry.register` returned.
            expected: From before that call.
            lease_s: What was registered for, now and the time before.
        """
        now_s = self._clock()
        for shard, memory in memories.items():
            listed_s = self._listed_s.get(shard)
            self._listed_s[shard] = expected.asked_s
            track = self._tracks.get(shard)
            if track is None:
                continue
            self._compare(shard, track, memory, expected.acknowledged.get(shard, 0))
            # The answer that told of a lapsed lease may be lost, so the time counts too.
            if listed_s is not None and (memory.is_new or now_s - listed_s > lease_s):
                # While this life was not listed, others may have cleaned its claims up.
                self._to_fill.add(shard)

    def refresh(self, entry_ttl_s: float) -> None:
        """Queue the claims older than half of their time to live, so that none ends while its block is held."""
        now_s = self._clock()
        due = []
        for key, held in islice(self._held.items(), self._limits.max_refreshed):
            if now_s - held.said_s < entry_ttl_s / 2:
                break
            due.append(key)
        for key in due:
            held = self._held.pop(key)
            self._held[key] = _Held(tier=held.tier, said_s=now_s)
        self._to_refresh.update(dict.fromkeys(due))

    @property
    def has_work(self) -> bool:
        """Whether `flush` has something to send."""
        return self.queue_depth > 0 or bool(self._to_fill)

    @property
    def wait_s(self) -> float | None:
        """Seconds until `flush` has something to try, unless more is noted; None: nothing waits."""
        if self._unplaced or self._to_refresh or self._to_fill:
            return 0.0
        due_s = [track.retry_at_s for track in self._tracks.values() if track.pending or track.backlog]
        if self._homeless:
            due_s.append(self._again.due_s)
        return max(0.0, min(due_s) - self._clock()) if due_s else None

    async def flush(self) -> float:
        """Send the changes that wait, and of what is to be said again a little.

        Returns:
            Seconds to leave to others before the next call; 0 when nothing was said again.
        """
        await self._place()
        async with asyncio.TaskGroup() as group:
            pauses = [group.create_task(self._flush_shard(shard, track)) for shard, track in self._tracks.items()]
        return max((pause.result() for pause in pauses), default=0.0)

    def _queue(self, key: BlockKey, tier: Tier | None) -> None:
        self._homeless.pop(key, None)
        self._unplaced.pop(key, None)
        self._unplaced[key] = tier

    def _is_over_bound(self) -> bool:
        waiting = [len(self._unplaced) + len(self._homeless), *(len(track.pending) for track in self._tracks.values())]
        return max(waiting) > self._limits.max_pending

    def _begin_generation(self) -> None:
        claimant = self.claimant
        self.claimant = Claimant(
            worker_id=claimant.worker_id, incarnation=claimant.incarnation, generation=claimant.generation + 1
        )
        self._unplaced.clear()
        self._homeless.clear()
        self._withdrawn.clear()
        self._to_refresh.clear()
        for track in self._tracks.values():
            track.pending.clear()
            track.backlog.clear()
        self._to_fill.update(self._tracks)
        self._has_dropped = True

    async def _place(self) -> None:
        """Give every change to the shard that keeps its block."""
        shards = await self._registry.shards()
        if set(shards) != self._tracks.keys():
            self._follow(shards)
        if self._again.is_due(self._clock()):
            self._ask_again()
        asked, again = list(self._unplaced), self._to_refresh
        self._to_refresh = {}
        placed = await self._registry.spread([*asked, *again])
        for shard, keys in placed.items():
            track = self._tracks.setdefault(shard, _ShardTrack())
            for key in keys:
                if key in self._unplaced:
                    track.pending.pop(key, None)
                    track.pending[key] = self._unplaced.pop(key)
                else:
                    track.backlog[key] = None
        self._keep_homeless([key for key in asked if key in self._unplaced])
        if self._to_fill:
            await self._fill(set(self._to_fill))

    def _ask_again(self) -> None:
        self._unplaced = self._homeless | self._unplaced
        self._homeless = {}

    def _keep_homeless(self, keys: list[BlockKey]) -> None:
        """Let changes wait that no shard takes; those which wait already do not wait longer for it."""
        if keys and not self._homeless:
            self._again.failed(self._clock())
        for key in keys:
            self._homeless[key] = self._unplaced.pop(key)
        if not self._homeless:
            self._again.succeeded()

    def _follow(self, shards: tuple[str, ...]) -> None:
        """Keep one track per shard; what waited for a shard that is gone is placed again."""
        is_first = not self._tracks
        self._again.succeeded()
        # Newer than what waits for a shard that is gone.
        self._ask_again()
        gone = self._tracks.keys() - set(shards)
        for shard in gone:
            track = self._tracks.pop(shard)
            self._unplaced = track.pending | self._unplaced
            self._listed_s.pop(shard, None)
        self._to_fill -= gone
        for shard in shards:
            if shard not in self._tracks:
                self._tracks[shard] = _ShardTrack()
                if not is_first or self._has_dropped:
                    self._to_fill.add(shard)
        if gone:
            # Those that are left may have taken its part over without the data.
            self._to_fill.update(shards)

    async def _fill(self, shards: set[str]) -> None:
        """Queue everything that `shards` should know."""
        self._to_fill -= shards
        held = await self._registry.spread(list(self._held))
        withdrawn = await self._registry.spread(list(self._withdrawn))
        for shard in shards:
            self.counts.resyncs += 1
            track = self._tracks[shard]
            track.backlog = dict.fromkeys(held.get(shard, ()))
            track.pending = dict.fromkeys(withdrawn.get(shard, ())) | track.pending

    async def _flush_shard(self, shard: str, track: _ShardTrack) -> float:
        if self._clock() < track.retry_at_s:
            return 0.0
        while track.pending:
            batch = dict(islice(track.pending.items(), self._limits.batch_size))
            for key in batch:
                del track.pending[key]
            claimant = self.claimant
            if not await self._send(shard, track, batch):
                if self.claimant is claimant:
                    track.pending = batch | track.pending
                return 0.0
        return await self._say_again(shard, track)

    async def _say_again(self, shard: str, track: _ShardTrack) -> float:
        started_s = self._clock()
        again: dict[BlockKey, Tier | None] = {}
        while track.backlog and len(again) < self._limits.resync_batch_size:
            for key in list(islice(track.backlog, self._limits.resync_batch_size - len(again))):
                del track.backlog[key]
                if key in self._held:
                    again[key] = self._held[key].tier
        if not again:
            return 0.0
        if not await self._send(shard, track, again):
            track.backlog = dict.fromkeys(again) | track.backlog
            return 0.0
        return self._limits.pause_factor * (self._clock() - started_s)

    async def _send(self, shard: str, track: _ShardTrack, batch: Mapping[BlockKey, Tier | None]) -> bool:
        before = track.acknowledged
        claimant = self.claimant
        track.sent += 1
        sequence = track.sent
        memory = await self._registry.write(shard, claimant, batch, sequence)
        if memory is None:
            track.retry_at_s = self._clock() + self._limits.retry_s
            return False
        self._compare(shard, track, memory, before)
        track.acknowledged = sequence
        return True

    def _compare(self, shard: str, track: _ShardTrack, memory: ShardMemory, acknowledged: int) -> None:
        if track.epoch is not None and memory.epoch != track.epoch:
            self.counts.epoch_changes += 1
            self._to_fill.add(shard)
        elif not acknowledged <= memory.sequence <= track.sent:
            self.counts.gaps += 1
            self._to_fill.add(shard)
        if shard in self._to_fill:
            track.acknowledged = memory.sequence
            track.sent = max(track.sent, memory.sequence)
        track.epoch = memory.epoch
