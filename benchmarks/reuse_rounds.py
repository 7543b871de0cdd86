"""What the answers of one round of the reuse benchmark say: who computed, who found, who fetched, and how soon."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.results import Completion


class WrongPath(Exception):
    """A request did not go the way that was to be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """First tokens of one prefix, ms."""

    computed_ms: float
    local_ms: float
    peer_ms: float
    blocks_moved: int
    bytes_moved: int
    transfer_ms: float
    lender_streams: int
    """Requests that the lender was decoding while it lent."""


def read_round(
    computed: Completion, local: Completion, streams: Sequence[Completion], *, prefix_tokens: int, block_size: int
) -> Round:
    """Check the way of each request and take its times.

    Args:
        computed: The first of the prefix.
        local: The second.
        streams: The later ones, in the order in which they were sent.
        prefix_tokens: Tokens that all have in common.
        block_size: Tokens per block.

    Raises:
        WrongPath: The prefix was not computed once, found once, and then fetched by another worker.
    """
    lender = computed.provenance.decode_worker
    if computed.usage.cached_tokens >= block_size:
        raise WrongPath(f"the fresh prefix was cached: {computed.usage.cached_tokens} tokens")
    if local.provenance.decode_worker != lender:
        raise WrongPath("the second request went to the other worker")
    _check_not_computed("second", local, prefix_tokens, block_size)
    if local.provenance.blocks_moved:
        raise WrongPath("the second request fetched blocks")
    sent_before, peer = next(
        ((number, each) for number, each in enumerate(streams) if each.provenance.decode_worker != lender), (0, None)
    )
    if peer is None:
        raise WrongPath(f"all {len(streams)} streams went to the worker that has the prefix")
    _check_not_computed("peer's", peer, prefix_tokens, block_size)
    if peer.provenance.blocks_moved < prefix_tokens // block_size:
        raise WrongPath(f"the other worker fetched {peer.provenance.blocks_moved} blocks only")
    return Round(
        computed_ms=computed.timings.first_token_s * 1e3,
        local_ms=local.timings.first_token_s * 1e3,
        peer_ms=peer.timings.first_token_s * 1e3,
        blocks_moved=peer.provenance.blocks_moved,
        bytes_moved=peer.provenance.bytes_moved,
        transfer_ms=peer.provenance.transfer_s * 1e3,
        lender_streams=sent_before,
    )


def _check_not_computed(which: str, completion: Completion, prefix_tokens: int, block_size: int) -> None:
    done = completion.provenance
    num_computed = done.prefill_computed_tokens + done.decode_computed_tokens
    most = completion.usage.prompt_tokens - prefix_tokens + block_size
    if num_computed > most:
        raise WrongPath(f"the {which} request computed {num_computed} prompt tokens, more than {most}")
