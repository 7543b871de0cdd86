"""One request between a door and the service: always closed, never silently ended."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import cast

from deployments.gateway.status_codes import translate_unexpected
from deployments.service import Chunk, GenerationService, GenerationSpec
from messages.errors import ServingError


@asynccontextmanager
async def open_chunks(service: GenerationService, spec: GenerationSpec) -> AsyncIterator[AsyncIterator[Chunk]]:
    """Yield the request's chunks; leaving, in whatever way, closes the service's iterator and waits for that.

    Raises:
        ServingError: From the service; or a stream without a finish, or any other exception, as INTERNAL.
    """
    # The service promises that its iterator can be closed, which the type AsyncIterator cannot say.
    source = cast("AsyncGenerator[Chunk, None]", service.generate(spec))
    async with aclosing(source), aclosing(_checked(source)) as chunks:
        yield chunks


async def _checked(source: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
    with translate_unexpected():
        async for chunk in source:
            yield chunk
            if chunk.finish is None:
                continue
            # Closing the service here would look like an abort to it, so its code runs to its end.
            if await anext(source, None) is not None:
                raise ServingError("internal error: the answer went on after its last chunk")
            return
        raise ServingError("internal error: the answer ended without its last chunk")
