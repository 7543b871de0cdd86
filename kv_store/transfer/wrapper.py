"""A transport around another one: everything goes through, and a subclass changes what it is about."""

from collections.abc import Sequence

from kv_store.transfer.protocol import BlockTransport, ByteRange


class WrappedTransport:
    """A BlockTransport that hands every call on to `inner`."""

    def __init__(self, inner: BlockTransport) -> None:
        self._inner = inner

    @property
    def agent_name(self) -> str:
        """See `BlockTransport.agent_name`."""
        return self._inner.agent_name

    @property
    def num_peers(self) -> int:
        """See `BlockTransport.num_peers`."""
        return self._inner.num_peers

    def metadata(self) -> bytes:
        """See `BlockTransport.metadata`."""
        return self._inner.metadata()

    def expect_readers(self, num_readers: int) -> None:
        """See `BlockTransport.expect_readers`."""
        self._inner.expect_readers(num_readers)

    async def connect(self, agent_name: str, metadata: bytes) -> None:
        """See `BlockTransport.connect`."""
        await self._inner.connect(agent_name, metadata)

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        """See `BlockTransport.read`."""
        return await self._inner.read(agent_name, ranges, deadline_s=deadline_s)

    async def disconnect(self, agent_name: str) -> None:
        """See `BlockTransport.disconnect`."""
        await self._inner.disconnect(agent_name)

    def close(self) -> None:
        """See `BlockTransport.close`."""
        self._inner.close()
