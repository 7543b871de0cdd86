"""Close at the owner: the digests of what was read are taken while its blocks are still pinned, then they go."""

import asyncio
from collections.abc import Callable

from kv_store.handoff import HandoffTable
from messages.handoff import BlockId, CloseReply, HandoffId

DigestBlock = Callable[[int, BlockId], int]
"""Gives the digest of one block of a KV group."""


async def close_with_digests(
    table: HandoffTable,
    handoff_id: HandoffId,
    incarnation: str,
    generation: int,
    *,
    clock: Callable[[], float],
    digest: DigestBlock | None,
) -> CloseReply:
    """End a read and free its blocks.

    Args:
        table: The owner's hand-offs.
        handoff_id: Which one.
        incarnation: Life of the owner that made it.
        generation: Given by Open.
        clock: The owner's.
        digest: Called in a thread for every block that was opened; None: the reply has no digests.

    Returns:
        Not valid when the generation is over, also when it ends while digests are taken.
    """
    digests: tuple[int, ...] = ()
    if digest is not None:
        blocks = table.opened_blocks(handoff_id, incarnation, generation, clock())
        digests = await asyncio.to_thread(lambda: tuple(digest(*block) for block in blocks))
    is_valid = table.close(handoff_id, incarnation, generation, clock())
    return CloseReply(is_valid=is_valid, digests=digests if is_valid else ())
