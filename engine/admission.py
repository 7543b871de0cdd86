"""What a request must meet to be taken in, and which of its blocks it offers or has to pull."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Whether more prompt tokens would have to be computed here than the request allows."""
    return state.max_uncached_tokens is not None and state.num_prompt - cached > state.max_uncached_tokens


def targets(
    state: RequestState, cached: int, cache: LocalCache, block_size: int
) -> tuple[tuple[BlockId | None, ...], ...]:
    """Where a DECODE part wants its prompt's blocks; None where it has them already, or has a hole."""
    assert state.table is not None, "a placed request has a table"
    first = cached // block_size
    # Token 1 may be known already and have a block of its own; only the prompt is pulled.
    end = -(-state.num_prompt // block_size)
    return tuple(
        tuple(None if index < first else block_id for index, block_id in enumerate(group[:end]))
        for group in cache.block_ids(state.table)
    )


def offer(state: RequestState, cache: LocalCache, block_size: int) -> tuple[tuple[BlockRef | None, ...], ...]:
    """The prompt's blocks of a PREFILL part, for a hand-off; full ones with their keys."""
    assert state.table is not None, "a placed request has a table"
    full = state.num_prompt // block_size
    return tuple(
        tuple(
            None if block_id is None else BlockRef(block_id=block_id, key=state.keys[i] if i < full else None)
            for i, block_id in enumerate(group)
        )
        for group in cache.block_ids(state.table)
    )
