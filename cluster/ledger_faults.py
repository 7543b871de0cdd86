"""A ledger whose commands are slow, refused or unanswered, as a plan of faults says."""

from typing import cast

from cluster.ledger import Ledger
from messages.errors import RegistryError
from messages.faults import Faults
from messages.faulty_calls import FaultyCalls

PREFIX = "ledger."


def with_faults(ledger: Ledger, faults: Faults) -> Ledger:
    """Put the fault points around a ledger; it comes back as it is when none is planned."""
    return cast("Ledger", FaultyCalls(ledger, faults, PREFIX, _unanswered)) if faults.has(PREFIX) else ledger


def _unanswered(name: str) -> object:
    raise RegistryError("a fault was asked for here", point=PREFIX + name)
