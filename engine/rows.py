"""How much of a choice one step computes, and the row that says so."""

from engine.admission import SchedulerLimits
from engine.batch import Row
from engine.request import RequestState
from kv_store.block_table import BlockIds


def chunk_size(state: RequestState, budget: int, limits: SchedulerLimits) -> int:
    """Tokens of a prompt to compute in a step that has room for `budget` more; 0: none.

    An unfinished prompt's chunk ends on a block boundary if it can, so that whole blocks are ready for a reader.
    """
    size = min(state.gap, budget, limits.max_chunk_tokens)
    if size == state.gap:
        return size
    aligned = (state.num_computed + size) // limits.block_size * limits.block_size
    return aligned - state.num_computed if aligned > state.num_computed else size


def make_row(state: RequestState, size: int, block_ids: tuple[BlockIds, ...]) -> Row:
    """The next `size` known tokens of a choice.

    Args:
        state: The choice.
        size: At most its gap.
        block_ids: Its blocks per group.
    """
    start, end = state.num_computed, state.num_computed + size
    needs_sample = end == len(state.tokens)
    wants_targets = state.wants_prompt_logprobs
    return Row(
        request_id=state.request_id,
        token_ids=tuple(state.tokens[start:end]),
        start=start,
        block_ids=block_ids,
        sampling=state.sampling if needs_sample else None,
        choices=state.next_choices if needs_sample else (state.choice,),
        prompt=state.request.prompt_token_ids,
        generated=state.generated,
        matcher=state.matcher,
        targets=tuple(state.tokens[start + 1 : end + 1]) if wants_targets else (),
        num_prompt_logprobs=(state.sampling.prompt_logprobs or 0) if wants_targets else 0,
    )
