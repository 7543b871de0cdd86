"""Moving ranges of bytes from a peer's registered memory into our own, one-sided.

A read that fails is over for its caller but perhaps not for the network: bytes may still land. So an error says when
the destination is quiet (`destination_free`), and nobody reuses it before.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from messages.errors import TransferError


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """One contiguous piece of a read; offsets are bytes from the start of each side's registered memory."""

    remote_offset: int
    local_offset: int
    size: int


class BlockTransport(Protocol):
    """Reads peers' memory and lets peers read ours; one registered buffer for its whole life."""

    @property
    def agent_name(self) -> str:
        """Unique for this life of the worker; a name is never used again."""
        ...

    @property
    def num_peers(self) -> int:
        """Peers whose registrations are held now."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to connect: base address and size of the memory, and how to reach it."""
        ...

    def expect_readers(self, num_readers: int) -> None:
        """Say how many peers are likely to read from us now; an owner that must help them on answers faster."""
        ...

    async def connect(self, agent_name: str, metadata: bytes) -> None:
        """Make a peer readable and warm the way to it; does nothing when it is connected.

        Raises:
            TransferError: The metadata is malformed or belongs to another name.
            PeerUnreachable: The peer does not answer in time; connecting again is allowed.
        """
        ...

    async def read(self, agent_name: str, ranges: Sequence[ByteRange], *, deadline_s: float) -> int:
        """Copy `ranges` from a peer; returns their total size when every byte is here.

        Cancelling waits a bounded time for the destination to be quiet, then raises with `destination_free` set.

        Raises:
            TransferError: A range leaves either side's memory (nothing was started), or the transfer failed.
            TransferTimeout: Not all bytes arrived within `deadline_s`.
            PeerUnreachable: The peer is not connected, or it is gone.
        """
        ...

    async def disconnect(self, agent_name: str) -> None:
        """Forget a peer and what is mapped of it; unknown names are fine.

        Reads still in flight fail; the peer is forgotten when the last of them is over.
        """
        ...

    def close(self) -> None:
        """Stop; blocks shortly. Reads in flight fail."""
        ...


def check_ranges(ranges: Sequence[ByteRange], *, local_size: int, remote_size: int) -> int:
    """Add up the sizes of `ranges`, having checked that they lie inside both memories.

    Raises:
        TransferError: One does not, or two write the same local bytes.
    """
    last_end = 0
    for piece in sorted(ranges, key=lambda piece: piece.local_offset):
        fits_remote = 0 <= piece.remote_offset <= remote_size - piece.size
        fits_local = 0 <= piece.local_offset <= local_size - piece.size
        if piece.size < 1 or not fits_remote or not fits_local:
            raise TransferError(
                "a range leaves the registered memory",
                remote_offset=piece.remote_offset,
                local_offset=piece.local_offset,
                size=piece.size,
                remote_size=remote_size,
                local_size=local_size,
            )
        if piece.local_offset < last_end:
            raise TransferError("two ranges write the same local bytes", local_offset=piece.local_offset)
        last_end = piece.local_offset + piece.size
    return sum(piece.size for piece in ranges)


def cut(ranges: Sequence[ByteRange], max_bytes: int) -> Iterator[list[ByteRange]]:
    """Split `ranges` into lists of at most `max_bytes`, cutting long ranges; order is kept."""
    group: list[ByteRange] = []
    room = max_bytes
    for whole in ranges:
        start = 0
        while start < whole.size:
            size = min(whole.size - start, room)
            group.append(
                ByteRange(remote_offset=whole.remote_offset + start, local_offset=whole.local_offset + start, size=size)
            )
            start += size
            room -= size
            if room == 0:
                yield group
                group, room = [], max_bytes
    if group:
        yield group


def mark_busy(error: BaseException, quiet: asyncio.Future[None]) -> None:
    """Say on `error` that its destination may still be written until `quiet` is done."""
    if not quiet.done():
        error.destination_free = quiet  # type: ignore[attr-defined]  # CancelledError takes it as well as ours


def destination_free(error: BaseException) -> "asyncio.Future[None] | None":
    """What to await before the destination of a failed read is reused; None: it is free already."""
    quiet: asyncio.Future[None] | None = getattr(error, "destination_free", None)
    return quiet
