"""A ledger whose commands are slow, refused or unanswered, as a plan of faults says."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

from cluster.ledger import Ledger
from messages.errors import RegistryError
from messages.faults import Faults

PREFIX = "ledger."


class FaultyLedger:
    """A Ledger around another one: each command passes point `ledger.<operation>`.

    error: nothing is done. drop: it is done, and the answer is lost. The caller cannot tell which.

    Args:
        inner: Does the work.
        faults: What is planned.
    """

    def __init__(self, inner: Ledger, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(attribute) or not self._faults.has(PREFIX + name):
            return attribute
        return functools.partial(self._pass, name, attribute)

    async def _pass(self, name: str, call: Callable[..., Awaitable[object]], *args: object, **named: object) -> object:
        fired = await self._faults.at(PREFIX + name, RegistryError)
        answer = await call(*args, **named)
        if fired.is_dropped:
            raise RegistryError("a fault was asked for here", point=PREFIX + name)
        return answer

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._inner.__aexit__(*exc_info)


def with_faults(ledger: Ledger, faults: Faults) -> Ledger:
    """Put the fault points around a ledger; it comes back as it is when none is planned."""
    return cast("Ledger", FaultyLedger(ledger, faults)) if faults.has(PREFIX) else ledger
