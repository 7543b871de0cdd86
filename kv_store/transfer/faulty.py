"""A transport on which reads are slow, fail or bring other bytes, as a plan of faults says."""

import time
from collections.abc import Sequence

import torch

from kv_store.transfer.protocol import BlockTransport, ByteRange
from kv_store.transfer.throttle import SharedLink, wait_until
from kv_store.transfer.wrapper import WrappedTransport
from messages.errors import TransferError, TransferTimeout
from messages.faults import Faults, Fired

READ_POINT = "transfer.read"


class FaultyTransport(WrappedTransport):
    """Passes point `transfer.read` with each read; everything else goes through unchanged.

    Args:
        inner: Moves the bytes.
        buffer: The arena that `inner` writes into, 1-D uint8.
        faults: What is planned.
    """

    def __init__(self, inner: BlockTransport, buffer: torch.Tensor, faults: Faults) -> None:
        super().__init__(inner)
        self._buffer = buffer
        self._faults = faults
        self._links: dict[float, SharedLink] = {}

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        """See `BlockTransport.read`; what a fault adds counts against the deadline too."""
        fired = self._faults.fire(READ_POINT)
        self._faults.kill_if(fired)
        started_s = time.monotonic()
        over_s = started_s + deadline_s
        done_s = self._done_s(fired, sum(piece.size for piece in ranges), started_s)
        await wait_until(min(started_s + fired.delay_s, over_s))
        rest_s = over_s - time.monotonic()
        size_bytes = await self._inner.read(agent_name, ranges, deadline_s=rest_s) if rest_s > 0 else 0
        await wait_until(min(done_s, over_s))
        if rest_s <= 0 or done_s > over_s:
            raise TransferTimeout("a read passed its deadline", agent_name=agent_name, deadline_s=deadline_s)
        if fired.is_corrupt and ranges:
            # One bit of the last byte: what comes early is what other checks would find.
            last = max(piece.local_offset + piece.size for piece in ranges) - 1
            self._buffer[last] ^= 1
        if fired.is_error:
            raise TransferError("a fault was asked for here", point=READ_POINT)
        return size_bytes

    def _done_s(self, fired: Fired, size_bytes: int, started_s: float) -> float:
        begins_s = started_s + fired.delay_s
        if fired.throttle_gb_s is None:
            return begins_s
        link = self._links.setdefault(fired.throttle_gb_s, SharedLink(fired.throttle_gb_s))
        return link.book(size_bytes, begins_s)


def with_faults(transport: BlockTransport, buffer: torch.Tensor, faults: Faults) -> BlockTransport:
    """Put the fault point around a transport; it comes back as it is when none is planned."""
    return FaultyTransport(transport, buffer, faults) if faults.has(READ_POINT) else transport
