"""What a scheduler does with the blocks of one choice: open, grow, advance, share, give back."""

from engine.request import Part, RequestState
from kv_store.block_key import block_keys
from kv_store.block_table import BlockIds, BlockTable
from kv_store.local_cache import BlockCopy, LocalCache
from messages.errors import OutOfBlocks


class ChoiceBlocks:
    """A choice's `num_computed` and the valid tokens of its table rise together."""

    def __init__(self, cache: LocalCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._copies: list[BlockCopy] = []

    def open(self, state: RequestState, cached: int) -> None:
        """Give a choice without blocks its hit and room for its known tokens.

        Raises:
            OutOfBlocks: There is no room; the choice has nothing.
        """
        table = self._cache.open_table(state.keys, cached)
        try:
            self._cache.extend(table, len(state.tokens))
        except OutOfBlocks:
            self._cache.drop(table)
            raise
        state.table, state.num_computed = table, cached

    def grow(self, state: RequestState) -> None:
        """Make room for the known tokens.

        Raises:
            OutOfBlocks: There is none; nothing changed.
        """
        self._cache.extend(self.table(state), len(state.tokens))

    def table(self, state: RequestState) -> BlockTable:
        """The table of a choice that is not waiting."""
        assert state.table is not None, "a placed request has a table"
        return state.table

    def ids(self, state: RequestState) -> tuple[BlockIds, ...]:
        """Block ids per group."""
        return self._cache.block_ids(self.table(state))

    def compute(self, state: RequestState, num_tokens: int) -> int:
        """Note that the next `num_tokens` tokens were computed; gives how many of them came with the request."""
        given = state.advance(num_tokens)
        self._extend_keys(state)
        self._cache.mark_valid(self.table(state), state.num_computed, state.keys)
        return given

    def read(self, state: RequestState, num_tokens: int) -> int:
        """Take in a prefix that was read, if it is longer than what is here; gives the tokens gained."""
        gained = max(0, num_tokens - state.num_computed)
        state.num_computed += gained
        # Before blocks are indexed: those that a window has passed were not read.
        self._cache.slide(self.table(state), state.num_computed)
        self._cache.mark_valid(self.table(state), state.num_computed, state.keys)
        return gained

    def slide(self, state: RequestState) -> None:
        """Give back what no window sees any more; never of a PREFILL part, whose reader knows the blocks."""
        if state.part is not Part.PREFILL:
            self._cache.slide(self.table(state), state.num_computed)

    def fork(self, state: RequestState, choice: int) -> RequestState:
        """Another choice at the prompt's end, without blocks."""
        return state.fork(choice, state.num_given // self._block_size)

    def share(self, state: RequestState, branch: RequestState) -> None:
        """Give a choice the prompt's blocks of another; it gets none when there is no room for a copy."""
        try:
            branch.table, copies = self._cache.fork(self.table(state), state.num_given)
        except OutOfBlocks:
            return
        self._copies.extend(copies)
        branch.num_computed = state.num_given

    def take_copies(self) -> list[BlockCopy]:
        """Block copies to be made before anything else writes into the arena."""
        copies, self._copies = self._copies, []
        return copies

    def drop(self, state: RequestState) -> None:
        """Give back whatever the choice holds."""
        if state.table is not None:
            self._cache.drop(state.table)
            state.table = None

    def _extend_keys(self, state: RequestState) -> None:
        size = self._block_size
        full = state.num_computed // size
        if full > len(state.keys):
            new = state.tokens[len(state.keys) * size : full * size]
            state.keys.extend(block_keys(state.keys[-1] if state.keys else state.root, new, size))
