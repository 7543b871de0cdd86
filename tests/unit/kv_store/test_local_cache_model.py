"""LocalCache against a model that writes tokens into blocks and reads them back, one full and two window groups."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kv_store.block_key import KeyExtras, block_keys, root_key
from kv_store.block_table import BlockTable
from kv_store.layout import BlockLayout, KvGroup
from kv_store.local_cache import LocalCache
from messages.errors import OutOfBlocks
from messages.handoff import BlockKey

SIZE = 2
WINDOWS = (None, 5, 2)
ROOT = root_key(KeyExtras(model="m", block_size=SIZE, codec="raw-float32"))
LAYOUT = BlockLayout(
    groups=tuple(
        KvGroup(name=str(window), layers=(layer,), num_kv_heads=1, k_dim=1, v_dim=1, window=window)
        for layer, window in enumerate(WINDOWS)
    ),
    block_size=SIZE,
    model_digest="m",
)
Prefix = tuple[int, ...]

DOCUMENTS = ([0] * 24, [1, 0] * 12, [0] * 8 + [1] * 16)

prompts = st.builds(
    lambda document, length, tail: document[:length] + tail,
    st.sampled_from(DOCUMENTS),
    st.integers(0, 24),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


def seen(number: int, end: int) -> range:
    """Positions whose KV group `number` must hold for a query at `end`."""
    window = WINDOWS[number]
    return range(0 if window is None else max(0, end - window), end)


@dataclass
class Request:
    """What the model knows of one request."""

    tokens: list[int]
    table: BlockTable

    @property
    def keys(self) -> list[BlockKey]:
        return block_keys(ROOT, self.tokens, SIZE)


@dataclass
class Memory:
    """What was last written at each place of each block: the whole prefix up to and with that token."""

    cells: dict[tuple[int, int, int], Prefix] = field(default_factory=dict)

    def write(self, cache: LocalCache, request: Request, start: int, stop: int) -> None:
        for number, ids in enumerate(cache.block_ids(request.table)):
            for position in range(start, stop):
                block_id = ids[position // SIZE]
                assert block_id is not None, "a new token has no block"
                group = cache._groups[number]
                assert group.num_references(block_id) == 1, "written while shared"
                assert block_id not in group.index, "written while it can be hit"
                self.cells[number, block_id, position % SIZE] = tuple(request.tokens[: position + 1])

    def check(self, cache: LocalCache, request: Request) -> None:
        """Assert that a query at the first invalid position finds what it needs in every group."""
        end = request.table.num_valid
        for number, ids in enumerate(cache.block_ids(request.table)):
            for position in seen(number, end):
                block_id = ids[position // SIZE]
                assert block_id is not None, "a needed token is in a hole"
                assert self.cells[number, block_id, position % SIZE] == tuple(request.tokens[: position + 1])


class LocalCacheMachine(RuleBasedStateMachine):
    """Requests come, compute, go back and leave in any order; no hit ever returns overwritten content."""

    requests: Bundle[Request] = Bundle("requests")

    @initialize(num_full=st.integers(4, 20), num_window=st.integers(3, 12), num_narrow=st.integers(3, 12))
    def start(self, num_full: int, num_window: int, num_narrow: int) -> None:
        self.num_blocks = (num_full, num_window, num_narrow)
        self.cache = LocalCache(LAYOUT, self.num_blocks)
        self.memory = Memory()
        self.live: list[Request] = []
        self.published: set[BlockKey] = set()

    @rule(target=requests, tokens=prompts)
    def open(self, tokens: list[int]) -> Request:
        return self.admit(tokens)

    def admit(self, tokens: list[int]) -> Request:
        keys = block_keys(ROOT, tokens, SIZE)
        num_cached = self.cache.match(keys, len(tokens))
        assert num_cached == self.longest_hit(keys, len(tokens))
        request = Request(tokens=tokens, table=self.cache.open_table(keys, num_cached))
        assert request.table.num_valid == num_cached < len(tokens)
        self.memory.check(self.cache, request)
        self.live.append(request)
        return request

    @rule(tokens=prompts, amount=st.integers(1, 30))
    def serve(self, tokens: list[int], amount: int) -> None:
        request = self.admit(tokens)
        while self.advance(request, amount) and request.table.num_valid < len(tokens):
            pass
        self.leave(request)

    @rule(request=requests, amount=st.integers(1, 30), more=st.lists(st.integers(0, 1), max_size=3))
    def compute(self, request: Request, amount: int, more: list[int]) -> None:
        if request.table.num_valid == len(request.tokens):
            request.tokens += more
        self.advance(request, amount)

    def advance(self, request: Request, amount: int) -> bool:
        start = request.table.num_valid
        stop = min(start + amount, len(request.tokens))
        before = self.cache.counts(), self.cache.block_ids(request.table), self.indexed()
        try:
            self.cache.extend(request.table, stop)
        except OutOfBlocks:
            assert before == (self.cache.counts(), self.cache.block_ids(request.table), self.indexed())
            return False
        self.memory.write(self.cache, request, start, stop)
        self.cache.mark_valid(request.table, stop, request.keys)
        self.cache.slide(request.table, stop)
        self.memory.check(self.cache, request)
        return True

    @rule(request=requests, data=st.data(), is_bad=st.booleans())
    def go_back(self, request: Request, data: st.DataObject, *, is_bad: bool) -> None:
        if is_bad:
            self.forget(request, data.draw(st.integers(0, request.table.num_valid)))
        else:
            self.truncate(request, data)

    def truncate(self, request: Request, data: st.DataObject) -> None:
        before = request.table.num_valid
        wanted = data.draw(st.integers(0, request.table.capacity))
        left = self.cache.truncate(request.table, wanted)
        assert left == request.table.num_valid <= min(wanted, before)
        self.memory.check(self.cache, request)
        request.tokens[max(left, 1) :] = data.draw(st.lists(st.integers(0, 1), max_size=3))

    def forget(self, request: Request, bad: int) -> None:
        self.cache.forget(request.table, bad)
        assert request.table.num_valid <= bad
        for number, group in enumerate(self.cache._groups):
            assert not any(block_id in group.index for block_id in request.table.held(number, bad // SIZE))
        self.cache.truncate(request.table, request.table.num_valid)
        self.memory.check(self.cache, request)

    @rule(request=consumes(requests), twice=st.booleans())
    def drop(self, request: Request, *, twice: bool) -> None:
        self.leave(request)
        if twice:
            self.leave(request)

    def leave(self, request: Request) -> None:
        self.cache.drop(request.table)
        self.live = [other for other in self.live if other is not request]

    @rule(luck=st.integers(0, 5))
    def report(self, luck: int) -> None:
        if luck == 0:
            self.cache.clear()
            assert all(group.cached == 0 for group in self.cache.counts())
        self.publish()

    def publish(self) -> None:
        changes = self.cache.take_changes()
        assert not self.published & set(changes.stored)
        assert set(changes.removed) <= self.published
        self.published = (self.published | set(changes.stored)) - set(changes.removed)
        assert self.published == set.intersection(*self.indexed())

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        for number, group in enumerate(self.cache.counts()):
            in_tables = {i for request in self.live for i in self.cache.block_ids(request.table)[number]} - {None}
            assert group.free + group.cached + group.referenced == group.total == self.num_blocks[number]
            assert group.referenced == len(in_tables)
            free = self.cache._groups[number]._free
            assert len(set(free)) == len(free)
            assert not set(free) & in_tables

    @invariant()
    def every_predecessor_is_indexed(self) -> None:
        index = self.cache._groups[0].index
        for entry in index._by_key.values():
            parent = entry.parent
            assert parent is None or index._by_key[parent.key] is parent

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request in self.live:
            self.cache.drop(request.table)
        for group in self.cache.counts():
            assert group.referenced == 0
            assert group.free + group.cached == group.total
        self.publish()
        self.cache.clear()
        self.publish()
        assert [group.free for group in self.cache.counts()] == list(self.num_blocks)
        assert self.published == set()

    def indexed(self) -> list[set[BlockKey]]:
        return [set(group.index._by_key) for group in self.cache._groups]

    def longest_hit(self, keys: list[BlockKey], num_tokens: int) -> int:
        """The definition, tried from the longest down."""
        indexed = self.indexed()
        for length in range((num_tokens - 1) // SIZE * SIZE, 0, -SIZE):
            needed = [{keys[position // SIZE] for position in seen(number, length)} for number in range(len(WINDOWS))]
            if all(want <= have for want, have in zip(needed, indexed, strict=True)):
                return length
        return 0


LocalCacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_no_sequence_of_requests_breaks_the_cache = LocalCacheMachine.TestCase
