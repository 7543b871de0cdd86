import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from deployments.worker.block_owner import RemoteOwner
from messages.errors import PeerUnreachable
from messages.handoff import BlockKey

KEYS = (BlockKey(b"k" * 32),)


@pytest.fixture
async def silent_owner() -> AsyncIterator[str]:
    """Something that listens and never answers."""
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield f"127.0.0.1:{port}"
    server.close()


async def asking(address: str) -> tuple[grpc.aio.Channel, "asyncio.Task[object]"]:
    channel = grpc.aio.insecure_channel(address)
    task = asyncio.create_task(RemoteOwner(channel, "reader", "f").lend("i", KEYS, 0))
    await asyncio.sleep(0.1)
    return channel, task


async def test_an_owner_that_is_forgotten_during_a_call_is_unreachable(silent_owner: str) -> None:
    """Its channel cancels the call; who waits for it was not cancelled."""
    channel, task = await asking(silent_owner)

    await channel.close()

    with pytest.raises(PeerUnreachable):
        await task


async def test_an_owner_that_was_forgotten_before_a_call_is_unreachable(silent_owner: str) -> None:
    channel = grpc.aio.insecure_channel(silent_owner)
    owner = RemoteOwner(channel, "reader", "f")
    await channel.close()

    with pytest.raises(PeerUnreachable):
        await owner.lend("i", KEYS, 0)


async def test_a_caller_that_is_cancelled_stays_cancelled(silent_owner: str) -> None:
    channel, task = await asking(silent_owner)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await channel.close()
