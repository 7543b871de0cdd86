"""Host memory that other processes of this machine can map: a worker's arena, which its peers read as their own.

A file without a name (memfd) is behind it, so nothing stays when a process ends, by whatever way. A peer finds it under
/proc and knows it by a random token that lies behind the data. What was mapped stays readable after its owner's death;
whether the owner lives is asked of the kernel, through a pidfd.
"""

import json
import logging
import mmap
import os
import secrets
import select
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from messages.errors import TransferError

log = logging.getLogger(__name__)

_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAddress:
    """Where a shared buffer is found by processes of the same machine, or container."""

    pid: int
    fd: int
    size_bytes: int
    token: str
    namespace: str
    """In which process ids the pid is one; elsewhere it names another process."""

    def to_bytes(self) -> bytes:
        """Pack for the wire."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Unpack what `to_bytes` made.

        Raises:
            TransferError: It is not such an address.
        """
        malformed = TransferError("malformed address of shared memory", size_bytes=len(data))
        try:
            address = cls(**json.loads(data))
            bytes.fromhex(address.token)
        except (ValueError, TypeError) as error:
            raise malformed from error
        numbers = (address.pid, address.fd, address.size_bytes)
        if any(type(number) is not int or number < 0 for number in numbers) or not isinstance(address.namespace, str):
            raise malformed
        return address


class SharedBuffer:
    """`tensor` is all of it, (size_bytes,), uint8; both live until the process ends.

    Args:
        size_bytes: At least 1.

    Raises:
        OSError: The machine has no such memory, or not enough.
    """

    def __init__(self, size_bytes: int) -> None:
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._fd = os.memfd_create("kvferry-arena", os.MFD_CLOEXEC)
        self._size_bytes = size_bytes
        os.ftruncate(self._fd, size_bytes + _TOKEN_BYTES)
        self._map = mmap.mmap(self._fd, size_bytes + _TOKEN_BYTES)
        self._map[size_bytes:] = self._token
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes)

    @property
    def address(self) -> SharedAddress:
        """Where peers find it."""
        return SharedAddress(
            pid=os.getpid(),
            fd=self._fd,
            size_bytes=self._size_bytes,
            token=self._token.hex(),
            namespace=_process_namespace(),
        )


class PeerMapping:
    """A peer's shared buffer, mapped here to be read."""

    def __init__(self, mapped: mmap.mmap, size_bytes: int, pidfd: int) -> None:
        self._map = mapped
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self.size_bytes = size_bytes
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8, count=size_bytes)
        """(size_bytes,), read-only."""

    @classmethod
    def open(cls, address: SharedAddress) -> Self | None:
        """Map a peer's buffer; None when it is on another machine or in another container, or its process is gone."""
        if address.namespace != _process_namespace():
            return None
        try:
            # First, so that it cannot be that of a later process with the same id whose memory has the token.
            pidfd = os.pidfd_open(address.pid)
        except OSError:
            return None
        try:
            mapped = _map_file(f"/proc/{address.pid}/fd/{address.fd}", address)
        except (OSError, ValueError) as error:
            log.info("peer.not_mapped pid=%d error=%s", address.pid, error)
            mapped = None
        if mapped is None:
            os.close(pidfd)
            return None
        return cls(mapped, address.size_bytes, pidfd)

    @property
    def is_alive(self) -> bool:
        """Whether the owner's process has not ended; a stopped one lives."""
        return not self._poll.poll(0)

    def close(self) -> None:
        """Unmap, when the last view of it is gone."""
        self._poll.unregister(self._pidfd)
        os.close(self._pidfd)
        self.bytes = np.zeros(0, np.uint8)
        with suppress(BufferError):
            self._map.close()


def _map_file(path: str, address: SharedAddress) -> mmap.mmap | None:
    """Map the file if it is the one that the address means.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is smaller than the address says.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # All its pages at once: met one by one, each would cost as much as its copy.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(fd, address.size_bytes + _TOKEN_BYTES, flags=flags, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return mapped if mapped[address.size_bytes :] == bytes.fromhex(address.token) else None


def _process_namespace() -> str:
    """Of the boot and of the process ids: equal where a pid means the same process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
        return f"{boot_id.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
