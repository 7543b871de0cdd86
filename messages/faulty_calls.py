"""An object whose asynchronous methods are slow, refused or unanswered, as a plan of faults says."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self

from messages.errors import RegistryError
from messages.faults import Faults


class AsyncContext(Protocol):
    """What is opened and closed with `async with`."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class FaultyCalls:
    """Hands everything on to `inner`; each coroutine method passes point `<prefix><name>`.

    error: nothing is done. drop: it is done, and the answer is lost. The caller cannot tell which.

    Args:
        inner: Does the work.
        faults: What is planned.
        prefix: Of the points.
        unanswered: What a call by this name gives, or raises, when no answer comes.
    """

    def __init__(self, inner: AsyncContext, faults: Faults, prefix: str, unanswered: Callable[[str], object]) -> None:
        self._inner = inner
        self._faults = faults
        self._prefix = prefix
        self._unanswered = unanswered

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(attribute) or not self._faults.has(self._prefix + name):
            return attribute
        return functools.partial(self._pass, name, attribute)

    async def _pass(self, name: str, call: Callable[..., Awaitable[object]], *args: object, **named: object) -> object:
        try:
            fired = await self._faults.at(self._prefix + name, RegistryError)
        except RegistryError:
            return self._unanswered(name)
        answer = await call(*args, **named)
        return self._unanswered(name) if fired.is_dropped else answer

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._inner.__aexit__(*exc_info)
