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
        ServingError: From the service; or a stream without all its finishes, or any other exception, as INTERNAL.
    """
    # The service promises that its iterator can be closed, which the type AsyncIterator cannot say.
    source = cast("AsyncGenerator[Chunk, None]", service.generate(spec))
    async with aclosing(source), aclosing(_checked(source, spec.n)) as chunks:
        yield chunks


async def _checked(source: AsyncIterator[Chunk], num_choices: int) -> AsyncGenerator[Chunk, None]:
    running = set(range(num_choices))
    with translate_unexpected():
        async for chunk in source:
            if chunk.choice not in running:
                raise ServingError("internal error: a choice went on after its finish")
            if chunk.finish is not None:
                running.remove(chunk.choice)
            if (chunk.summary is None) != bool(running):
                raise ServingError("internal error: the summary does not come with the last finish")
            yield chunk
            if chunk.summary is None:
                continue
            # Closing the service here would look like an abort to it, so its code runs to its end.
            if await anext(source, None) is not None:
                raise ServingError("internal error: the answer went on after its last chunk")
            return
        raise ServingError("internal error: the answer ended without its last chunk")
