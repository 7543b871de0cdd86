"""Why a reader and the owner of blocks did not come together, as it is counted."""

from messages.errors import HandoffStale, HandoffUnknown, LayoutMismatch, ServingError, TransferError
from telemetry.metrics import WorkerCounter

_REASONS: tuple[tuple[type[ServingError], WorkerCounter], ...] = (
    (LayoutMismatch, WorkerCounter.HANDSHAKES_LAYOUT),
    (HandoffUnknown, WorkerCounter.HANDSHAKES_UNKNOWN),
    (HandoffStale, WorkerCounter.HANDSHAKES_STALE),
    (TransferError, WorkerCounter.HANDSHAKES_UNREACHABLE),
)


def handshake_failure(error: ServingError) -> WorkerCounter:
    """Which counter a failure before the first read belongs to: the reader was refused, or Open failed."""
    reasons = (counter for kind, counter in _REASONS if isinstance(error, kind))
    return next(reasons, WorkerCounter.HANDSHAKES_UNFIT)
