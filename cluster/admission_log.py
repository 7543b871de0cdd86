"""What a worker keeps of the reservations that it has admitted, so that its heartbeats can say which they count."""

from dataclasses import dataclass, field

from messages.reservations import Admitted

MAX_BEYOND = 32
MAX_ISSUERS = 16


@dataclass(slots=True)
class _Row:
    """A sequence that was admitted is at most `through` or in `beyond`, never both."""

    through: int = 0
    beyond: set[int] = field(default_factory=set)

    def admit(self, sequence: int, max_beyond: int) -> None:
        if sequence <= self.through:
            return
        self.beyond.add(sequence)
        if len(self.beyond) > max_beyond:
            # Who has not come by now was cancelled before it was sent, so its reservation is over.
            self._advance(min(self.beyond))
        while self.through + 1 in self.beyond:
            self._advance(self.through + 1)

    def _advance(self, through: int) -> None:
        self.through = through
        self.beyond.discard(through)


class AdmissionLog:
    """Of one life of a worker; its size is bounded whatever comes.

    A request is admitted when the load that the next heartbeat reports has it, queued or running.
    """

    def __init__(self, *, max_beyond: int = MAX_BEYOND, max_issuers: int = MAX_ISSUERS) -> None:
        """Start empty.

        Args:
            max_beyond: Sequences that may wait for earlier ones; with more, the earliest gap is given up.
            max_issuers: Of more, the one that was silent for longest is forgotten.
        """
        self._max_beyond = max_beyond
        self._max_issuers = max_issuers
        self._rows: dict[str, _Row] = {}
        """By issuer, the longest silent first."""

    def admit(self, issuer: str, sequence: int) -> None:
        """Take note of a reservation whose request has come; any order, twice is once."""
        row = self._rows.pop(issuer, None) or _Row()
        row.admit(sequence, self._max_beyond)
        self._rows[issuer] = row
        if len(self._rows) > self._max_issuers:
            del self._rows[next(iter(self._rows))]

    def admitted(self) -> tuple[Admitted, ...]:
        """Return what a heartbeat says, one entry per issuer."""
        return tuple(
            Admitted(issuer=issuer, through=row.through, beyond=tuple(sorted(row.beyond)))
            for issuer, row in self._rows.items()
        )
