"""The envelope around a transport's metadata: where a peer's one registered buffer lies and how large it is."""

import struct
from dataclasses import dataclass

from messages.errors import TransferError

_HEADER = struct.Struct("<4sBxHiQQ")
_MAGIC = b"KVF1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """One registered buffer, as its readers see it."""

    agent_name: str
    base_address: int
    size_bytes: int
    is_device: bool
    """In the memory of an accelerator, not of the host."""
    device_index: int
    agent_metadata: bytes
    """Opaque to us."""

    def to_bytes(self) -> bytes:
        """Pack for the wire."""
        name = self.agent_name.encode()
        place = (self.is_device, len(name), self.device_index, self.base_address, self.size_bytes)
        return _HEADER.pack(_MAGIC, *place) + name + self.agent_metadata

    @staticmethod
    def from_bytes(data: bytes) -> "PeerMemory":
        """Unpack what `to_bytes` made.

        Raises:
            TransferError: It is not such an envelope.
        """
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise TransferError("malformed metadata of a peer", size_bytes=len(data))
        _, is_device, name_size, device_index, base_address, size_bytes = _HEADER.unpack_from(data)
        name, agent_metadata = data[_HEADER.size :][:name_size], data[_HEADER.size + name_size :]
        if not agent_metadata:
            raise TransferError("truncated metadata of a peer", size_bytes=len(data))
        return PeerMemory(
            agent_name=name.decode(errors="replace"),
            base_address=base_address,
            size_bytes=size_bytes,
            is_device=bool(is_device),
            device_index=device_index,
            agent_metadata=agent_metadata,
        )
