"""A virtual model whose KV is the token itself, and a scheduler on top of it: a wrong block is seen at once."""

import hashlib
from collections.abc import Sequence

from engine.admission import SchedulerLimits
from engine.batch import Batch, Matcher, Row, RowResult, Sampled
from engine.events import Borrowing, EngineEvent, Lent, WorkDone
from engine.request import BorrowTerms, Part, RequestState, Totals
from engine.scheduler import Scheduler
from kv_store.block_key import KeyExtras, block_keys, root_key
from kv_store.layout import BlockLayout, KvGroup
from kv_store.local_cache import BlockCopy, LocalCache
from messages.handoff import BlockKey
from messages.requests import GenerationRequest, RequestId, SamplingParams
from messages.tokens import FinishReason, TokenEvent

BLOCK = 4
END_TOKEN = 7


class VirtualModel:
    """Writes each token into its place and, before sampling, reads the whole context back from the blocks."""

    def __init__(self, window: int | None, block_size: int = BLOCK) -> None:
        self.window = window
        self.block_size = block_size
        self.memory: dict[tuple[int, int, int], int] = {}

    def run(self, batch: Batch) -> list[RowResult]:
        for row in batch.rows:
            for group, blocks in enumerate(row.block_ids):
                for offset, token_id in enumerate(row.token_ids):
                    place, inside = divmod(row.start + offset, self.block_size)
                    block = blocks[place]
                    assert block is not None
                    self.memory[group, block, inside] = token_id
        return [self._result(row) for row in batch.rows]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for inside in range(self.block_size):
                key = (copy.group, copy.source, inside)
                if key in self.memory:
                    self.memory[copy.group, copy.target, inside] = self.memory[key]

    def _result(self, row: Row) -> RowResult:
        if row.sampling is None:
            return RowResult()
        token_id = self._sample(row.block_ids, row.end)
        return RowResult(samples=tuple(Sampled(token_ids=(choose(token_id, choice),)) for choice in row.choices))

    def _sample(self, block_ids: Sequence[Sequence[int | None]], end: int) -> int:
        seen = []
        for group, blocks in enumerate(block_ids):
            first = 0 if group == 0 or self.window is None else max(0, end - self.window)
            for position in range(first, end):
                place, inside = divmod(position, self.block_size)
                block = blocks[place]
                assert block is not None, "a visible position is a hole"
                seen.append(self.memory[group, block, inside])
        return _digest(seen)


def _digest(values: Sequence[int]) -> int:
    return hashlib.sha256(repr(list(values)).encode()).digest()[0] % 50


def choose(token_id: int, choice: int) -> int:
    """Another token per choice, so that choices go apart."""
    return (token_id + 5 * choice) % 50


def golden(prompt: Sequence[int], max_tokens: int, window: int | None, choice: int = 0) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        seen = list(tokens)
        if window is not None:
            seen += tokens[max(0, len(tokens) - window) :]
        tokens.append(choose(_digest(seen), choice))
        if tokens[-1] == END_TOKEN:
            break
    return tokens[len(prompt) :]


class Bench:
    """A scheduler, its cache and the virtual model."""

    def __init__(self, num_blocks: int = 64, window: int | None = None, block_size: int = BLOCK, **limits: int) -> None:
        self.block_size = block_size
        groups = [KvGroup(name="full", layers=(0,), num_kv_heads=1, k_dim=2, v_dim=2)]
        if window is not None:
            groups.append(KvGroup(name="window", layers=(1,), num_kv_heads=1, k_dim=2, v_dim=2, window=window))
        layout = BlockLayout(groups=tuple(groups), block_size=block_size, model_digest="m")
        self.cache = LocalCache(layout, (num_blocks,) * len(groups))
        merged = {"max_step_tokens": 16, "max_chunk_tokens": 16, "max_running": 8, "context_length": 512} | limits
        self.scheduler = Scheduler(self.cache, SchedulerLimits(block_size=block_size, **merged))
        self.model = VirtualModel(window, block_size)
        self.tokens: dict[str, list[int]] = {}
        self.next_index: dict[str, int] = {}
        self.finished: dict[str, FinishReason] = {}
        self.events: list[EngineEvent] = []
        self.batches: list[Batch] = []
        self.now_s = 0.0

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 5,
        part: Part = Part.WHOLE,
        max_uncached: int | None = None,
        n: int = 1,
        priority: int = 0,
        salt: bytes = b"",
        stop: tuple[int, ...] = (),
        end: tuple[int, ...] = (END_TOKEN,),
        matcher: Matcher | None = None,
        borrow: BorrowTerms | None = None,
        prompt_logprobs: int | None = None,
        generated: tuple[int, ...] = (),
        choice: int = 0,
    ) -> None:
        request = GenerationRequest(
            request_id=RequestId(name),
            model="m",
            prompt_token_ids=tuple(prompt),
            priority=priority,
            generated_token_ids=generated,
            choice=choice,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                end_token_ids=end,
                stop_token_ids=stop,
                n=n,
                prompt_logprobs=prompt_logprobs,
            ),
        )
        root = root_key(KeyExtras(model="m", block_size=self.block_size, codec="raw-float32", adapter=None, salt=salt))
        state = RequestState(
            request=request,
            part=part,
            root=root,
            keys=block_keys(root, request.known_token_ids, self.block_size),
            totals=Totals(arrived_s=self.now_s),
            max_uncached_tokens=max_uncached,
            matcher=matcher,
            borrow=borrow,
            choice=choice,
        )
        if generated:
            self.next_index[_name(request.request_id, choice)] = len(generated) + (part is Part.DECODE)
        self._take(self.scheduler.submit(state))

    def step(self) -> bool:
        self.now_s += 1.0
        batch, events = self.scheduler.next_batch(self.now_s)
        self._take(events)
        if batch is None:
            return False
        self.batches.append(batch)
        self._take(self.scheduler.commit(batch, self.model.run(batch), self.now_s))
        self.model.copy_blocks(self.scheduler.take_copies())
        return True

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("the scheduler does not come to rest")

    def receive(self, name: str, num_tokens: int) -> None:
        self._take(self.scheduler.receive(RequestId(name), num_tokens))

    def lend(self, name: str, keys: Sequence[BlockKey], first_block: int = 0) -> Lent:
        (lent,) = self.scheduler.lend(RequestId(name), keys, first_block)
        assert isinstance(lent, Lent)
        return lent

    def read(self, owner: "Bench", lent: Lent, wanted: Borrowing) -> int:
        """Copy what is lent into the places that are wanted; gives the number of blocks."""
        pairs = [
            (group, ref.block_id, local_id)
            for group, (refs, local_ids) in enumerate(zip(lent.groups, wanted.groups, strict=True))
            for ref, local_id in zip(refs, local_ids, strict=False)
            if ref is not None and local_id is not None
        ]
        for group, remote_id, local_id in pairs:
            for inside in range(self.block_size):
                # The end of a last block was never written.
                if (group, remote_id, inside) in owner.model.memory:
                    self.model.memory[group, local_id, inside] = owner.model.memory[group, remote_id, inside]
        return len(pairs)

    def finished_prefills(self) -> set[str]:
        """Requests whose blocks only a hand-off keeps."""
        return {event.request_id for event in self.events if isinstance(event, WorkDone) and event.is_held}

    def take(self, kind: type[EngineEvent]) -> list[EngineEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def computed_prompt_tokens(self) -> int:
        return int(self.scheduler.load().counters["prompt_tokens_computed_total"])

    def assert_baseline(self) -> None:
        for group in self.cache.counts():
            assert group.referenced == 0
            assert group.free + group.cached == group.total
        assert list(self.scheduler.request_ids()) == []

    def _take(self, events: Sequence[EngineEvent]) -> None:
        self.events.extend(events)
        for event in events:
            if isinstance(event, TokenEvent):
                name = _name(event.request_id, event.choice)
                known = self.tokens.setdefault(name, [])
                assert name not in self.finished, "tokens after the last event"
                # A decode part begins at token 2.
                assert event.first_index == self.next_index.get(name, min(event.first_index, 1))
                self.next_index[name] = event.first_index + len(event.token_ids)
                known.extend(event.token_ids)
                if event.finish_reason is not None:
                    self.finished[name] = event.finish_reason


def _name(request_id: str, choice: int) -> str:
    return request_id if choice == 0 else f"{request_id}/{choice}"


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 43 for i in range(length)]
