"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what the sources give, as it comes; each source's own order is kept.

    Closing it, or the first error of any source, closes all of them.
    """
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting[task]
                try:
                    item = task.result()
                except StopAsyncIteration:
                    del waiting[task]
                    continue
                del waiting[task]
                waiting[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()
