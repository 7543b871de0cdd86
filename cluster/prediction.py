"""When a request would get its tokens on each worker, and what it would cost those that are there already.

All arrays have one value per row of the snapshot; all times are milliseconds and continuous in every count of tokens.
A prompt is computed in chunks, each in a step that the worker's decodes share: every step of it lasts as long as a step
without prompt tokens, and longer by the chunk.
"""

from dataclasses import dataclass

import numpy as np

from cluster.snapshot import Columns, Floats, Ints, Snapshot

HANDOFF_OVERHEAD_MS = 10.0
"""Preparing, opening and closing a hand-off, whatever is moved."""


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """What computing one prompt means on each row."""

    compute_ms: Floats
    """What it takes after all that is queued, to token 1."""
    ttft_ms: Floats
    """The same with the queue."""
    delay_ms: Floats
    """By how much it holds up a request that is decoding on the row."""
    last_chunk: Floats
    """Share of the computed tokens that are in the last chunk."""


def prompt_times(columns: Columns, prompt_tokens: int, work_tokens: Floats) -> PromptTimes:
    """Predict one prompt on every row.

    Args:
        columns: Of the snapshot.
        prompt_tokens: Its length.
        work_tokens: What is to be computed of it, (n,); positive.
    """
    # While others are queued its first chunks are in the same steps as theirs, as far as there is room.
    own_steps = np.maximum(work_tokens / columns.chunk_tokens - columns.queue_steps, 1.0)
    num_steps = np.maximum(work_tokens / columns.prompt_room, own_steps)
    # On average a chunk attends to what is there and to half of what is computed.
    context = prompt_tokens - 0.5 * work_tokens
    delay_ms = columns.prefill_token_ms * work_tokens + num_steps * (columns.context_token_ms * context)
    compute_ms = delay_ms + num_steps * columns.step_ms
    return PromptTimes(compute_ms, columns.queue_ms + compute_ms, delay_ms, 1.0 / num_steps)


def token_ms(columns: Columns, context_tokens: float) -> Floats:
    """What one more decoding request with so much context adds to every step, (n,)."""
    return columns.decode_token_ms + columns.context_token_ms * context_tokens


def queued_delay_ms(columns: Columns, output_tokens: float) -> Floats:
    """By how much the prompts queued on a row hold up the tokens of a request that decodes there already, (n,).

    Args:
        columns: Of the snapshot.
        output_tokens: Tokens after the first that the request will generate; it can be held up in no more steps.
    """
    return np.minimum(columns.queue_work_ms, output_tokens * columns.full_step_work_ms)


def lacking_token_ms(columns: Columns, turnover_ms: Floats) -> Floats:
    """How long a request waits for each token of KV room that is lacking, (n,).

    Args:
        columns: Of the snapshot.
        turnover_ms: Time in which all that is held now will have been given back, (n,).
    """
    return turnover_ms / np.maximum(columns.total_tokens - columns.free_tokens, 1.0)


def handoff_ms(transfer_ms: Floats | float, compute_ms: Floats | float, last_chunk: Floats | float) -> Floats:
    """Time that a hand-off adds after token 1; arguments broadcast.

    Blocks are read while the next chunk is computed, so what shows is the last chunk, or what the reader is behind.

    Args:
        transfer_ms: Time to read all that the decode worker lacks.
        compute_ms: Time to compute the prompt.
        last_chunk: Share of it that is in the last chunk.
    """
    return HANDOFF_OVERHEAD_MS + np.maximum(transfer_ms * last_chunk, transfer_ms - compute_ms)


def transfer_ms(snapshot: Snapshot, lacking_tokens: Floats | Ints) -> Floats:
    """Time in which each row would read so many tokens of KV, (n,)."""
    return snapshot.bytes_between(lacking_tokens) * (1e3 / snapshot.columns.transfer_bytes_s)
