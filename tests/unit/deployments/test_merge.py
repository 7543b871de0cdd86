"""Several streams become one, whole or not at all."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator

import pytest

from deployments.merge import merge


class Source:
    """Numbers, each after a turn of the loop; remembers how it ended."""

    def __init__(self, name: str, count: int, fails_at: int | None = None) -> None:
        self.name = name
        self._count = count
        self._fails_at = fails_at
        self.is_closed = False

    async def items(self) -> AsyncGenerator[tuple[str, int], None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(0)
                if number == self._fails_at:
                    raise ValueError(self.name)
                yield self.name, number
        finally:
            self.is_closed = True


async def test_every_source_is_given_whole_and_in_order() -> None:
    sources = [Source("a", 5), Source("b", 0), Source("c", 9)]

    seen: dict[str, list[int]] = defaultdict(list)
    async for name, number in merge([source.items() for source in sources]):
        seen[name].append(number)

    assert seen == {"a": list(range(5)), "c": list(range(9))}


async def test_sources_advance_together() -> None:
    order = [name async for name, _ in merge([Source("a", 4).items(), Source("b", 4).items()])]

    assert set(order[:3]) == {"a", "b"}


async def test_the_first_error_closes_the_others() -> None:
    sources = [Source("a", 100), Source("b", 3, fails_at=2)]

    with pytest.raises(ValueError, match="b"):
        async for _ in merge([source.items() for source in sources]):
            pass

    assert all(source.is_closed for source in sources)


async def test_closing_it_closes_every_source() -> None:
    sources = [Source("a", 100), Source("b", 100)]
    merged = merge([source.items() for source in sources])
    await anext(merged)

    await merged.aclose()

    assert all(source.is_closed for source in sources)
