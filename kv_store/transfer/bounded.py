"""A transport that keeps a bounded number of peers: the one that was used least recently makes room."""

from collections.abc import Sequence

from kv_store.transfer.protocol import BlockTransport, ByteRange
from kv_store.transfer.wrapper import WrappedTransport
from messages.errors import TransferError


class BoundedTransport(WrappedTransport):
    """Connects at most `max_peers`; a peer with a read in flight is never the one that makes room.

    A peer that made room is simply not connected any more: a read of it fails and its owner has to be opened again.

    Args:
        inner: Moves the bytes.
        max_peers: Peers connected at a time, >= 1.
    """

    def __init__(self, inner: BlockTransport, max_peers: int) -> None:
        super().__init__(inner)
        self._max_peers = max_peers
        self._num_uses: dict[str, int] = {}
        """Calls in flight by peer, least recently used peer first."""

    async def connect(self, agent_name: str, metadata: bytes) -> None:
        """See `BlockTransport.connect`.

        Raises:
            TransferError: So many peers are connected already, and all of them are being read.
        """
        while agent_name not in self._num_uses and len(self._num_uses) >= self._max_peers:
            idle = next((name for name, num_uses in self._num_uses.items() if num_uses == 0), None)
            if idle is None:
                raise TransferError("every peer that may be connected is being read", max_peers=self._max_peers)
            await self.disconnect(idle)
        self._begin(agent_name)
        try:
            await self._inner.connect(agent_name, metadata)
        except BaseException:
            if self._end(agent_name) == 0:
                # What is half connected holds a registration as well.
                await self.disconnect(agent_name)
            raise
        self._end(agent_name)

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        """See `BlockTransport.read`."""
        if agent_name not in self._num_uses:
            return await self._inner.read(agent_name, ranges, deadline_s=deadline_s)
        self._begin(agent_name)
        try:
            return await self._inner.read(agent_name, ranges, deadline_s=deadline_s)
        finally:
            self._end(agent_name)

    async def disconnect(self, agent_name: str) -> None:
        """See `BlockTransport.disconnect`."""
        self._num_uses.pop(agent_name, None)
        await self._inner.disconnect(agent_name)

    def _begin(self, agent_name: str) -> None:
        # Put back at the end of the order.
        self._num_uses[agent_name] = self._num_uses.pop(agent_name, 0) + 1

    def _end(self, agent_name: str) -> int:
        left = self._num_uses.get(agent_name, 0) - 1
        if left >= 0:
            self._num_uses[agent_name] = left
        return max(0, left)
