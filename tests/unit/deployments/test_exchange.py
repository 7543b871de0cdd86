"""What a door hands on is a whole answer: one finish per choice, the summary with the last of them."""

from collections.abc import AsyncIterator, Sequence

import pytest

from deployments.gateway.exchange import open_chunks
from deployments.gateway.scripted_service import Script, ScriptedService
from deployments.service import Chunk, Finish, GenerationSpec, Summary
from messages.errors import ServingError
from messages.tokens import FinishReason, Provenance, Usage

FINISH = Finish(reason=FinishReason.STOP)
SUMMARY = Summary(
    usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
    provenance=Provenance(),
    first_token_s=0.0,
    total_s=0.0,
)


class FixedService(ScriptedService):
    """Gives exactly these chunks, whatever the promise says."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(Script(pieces=[]))
        self._chunks = chunks

    async def generate(self, spec: GenerationSpec) -> AsyncIterator[Chunk]:
        for chunk in self._chunks:
            yield chunk


def chunk(choice: int = 0, finish: Finish | None = None, summary: Summary | None = None) -> Chunk:
    return Chunk(request_id="r", text="x", token_ids=(1,), choice=choice, finish=finish, summary=summary)


async def received(chunks: Sequence[Chunk], n: int) -> int:
    async with open_chunks(FixedService(chunks), GenerationSpec(prompt="p", n=n)) as checked:
        return len([chunk async for chunk in checked])


async def test_a_whole_answer_passes() -> None:
    assert await received([chunk(), chunk(1, FINISH), chunk(), chunk(0, FINISH, SUMMARY)], n=2) == 4


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [chunk()],
        [chunk(0, FINISH), chunk(1)],
        [chunk(0, FINISH, SUMMARY)],
        [chunk(0, FINISH), chunk(1, FINISH)],
        [chunk(0, FINISH), chunk(0, FINISH, SUMMARY)],
        [chunk(0, None, SUMMARY)],
        [chunk(2, FINISH)],
        [chunk(0, FINISH), chunk(1, FINISH, SUMMARY), chunk()],
    ],
)
async def test_anything_else_is_an_internal_error(chunks: list[Chunk]) -> None:
    with pytest.raises(ServingError, match="internal error"):
        await received(chunks, n=2)
