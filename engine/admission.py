"""What a request must meet to be taken in, and which of its blocks it offers or has to pull."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.events import Borrowing
from engine.request import RequestState
from kv_store.local_cache import GroupCounts, LocalCache
from messages.errors import InvalidRequest, Overloaded, ServingError
from messages.handoff import BlockId, BlockRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How much one step and one queue may hold."""

    block_size: int = 32
    max_step_tokens: int = 512
    max_chunk_tokens: int = 512
    """Most prompt tokens of one request in one step."""
    max_running: int = 64
    max_waiting: int = 256
    context_length: int = 8192
    preempts_each_once: bool = False
    """Fault point: every request that may be preempted is, once, at its third generated token."""


def refusal(
    state: RequestState, limits: SchedulerLimits, groups: Sequence[GroupCounts], num_waiting: int
) -> ServingError | None:
    """Say why a request cannot be queued: it can never run, or the queue is full; None: it can."""
    most = state.num_prompt + state.sampling.max_tokens
    if not state.tokens:
        return InvalidRequest("the prompt is empty", param="prompt")
    if state.generated and (state.sampling.n > 1 or len(state.generated) >= state.sampling.max_tokens):
        return InvalidRequest("a replay goes on with one choice that has not ended", param="generated_token_ids")
    if most > limits.context_length:
        return InvalidRequest(
            "prompt and max_tokens exceed the context length",
            param="max_tokens",
            prompt_tokens=state.num_prompt,
            max_tokens=state.sampling.max_tokens,
            context_length=limits.context_length,
        )
    if any(group.total * limits.block_size < most for group in groups):
        return InvalidRequest("the request needs more KV blocks than this worker has", tokens=most)
    if num_waiting >= limits.max_waiting:
        return Overloaded("the worker's queue is full", max_waiting=limits.max_waiting)
    return None


def is_too_cold(state: RequestState, cached: int) -> bool:
    """Whether more tokens would have to be computed here than the request allows."""
    return state.max_uncached_tokens is not None and state.num_given - cached > state.max_uncached_tokens


def borrowable_blocks(state: RequestState, cached: int, block_size: int) -> int:
    """Leading blocks to try to have after borrowing; 0 when it does not pay or would not be enough."""
    # The log probabilities of borrowed tokens would be missing.
    if state.borrow is None or state.wants_prompt_logprobs:
        return 0
    # The last of them is always computed.
    blocks = min(state.borrow.max_tokens, state.num_given - 1) // block_size
    gained = blocks * block_size - cached
    return blocks if gained >= max(1, state.borrow.min_tokens) and not is_too_cold(state, blocks * block_size) else 0


def borrowing(state: RequestState, num_blocks: int, cache: LocalCache, block_size: int) -> Borrowing:
    """Ask for the first `num_blocks` blocks of a placed request."""
    wanted = num_blocks * block_size
    return Borrowing(
        request_id=state.request_id,
        cached_tokens=state.num_computed,
        keys=tuple(state.keys[:num_blocks]),
        groups=targets(state, state.num_computed, wanted, cache, block_size),
    )


def targets(
    state: RequestState, cached: int, wanted: int, cache: LocalCache, block_size: int
) -> tuple[tuple[BlockId | None, ...], ...]:
    """Where a request wants the blocks of tokens [0, wanted); None where it has them already, or has a hole."""
    assert state.table is not None, "a placed request has a table"
    first = cached // block_size
    # Token 1 may be known already and have a block of its own, which is not read.
    end = -(-wanted // block_size)
    return tuple(
        tuple(None if index < first else block_id for index, block_id in enumerate(group[:end]))
        for group in cache.block_ids(state.table)
    )


def offer(state: RequestState, cache: LocalCache, block_size: int) -> tuple[tuple[BlockRef | None, ...], ...]:
    """Blocks of the given tokens of a PREFILL part, for a hand-off; full ones with their keys."""
    assert state.table is not None, "a placed request has a table"
    full = state.num_given // block_size
    return tuple(
        tuple(
            None if block_id is None else BlockRef(block_id=block_id, key=state.keys[i] if i < full else None)
            for i, block_id in enumerate(group)
        )
        for group in cache.block_ids(state.table)
    )
