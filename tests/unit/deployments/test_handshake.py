import pytest

from deployments.worker.handshake import handshake_failure
from messages.errors import (
    HandoffError,
    HandoffStale,
    HandoffUnknown,
    LayoutMismatch,
    PeerUnreachable,
    ServingError,
    TransferError,
)
from telemetry.metrics import WorkerCounter


@pytest.mark.parametrize(
    ("kind", "counter"),
    [
        (LayoutMismatch, WorkerCounter.HANDSHAKES_LAYOUT),
        (HandoffError, WorkerCounter.HANDSHAKES_UNFIT),
        (HandoffUnknown, WorkerCounter.HANDSHAKES_UNKNOWN),
        (HandoffStale, WorkerCounter.HANDSHAKES_STALE),
        (PeerUnreachable, WorkerCounter.HANDSHAKES_UNREACHABLE),
        (TransferError, WorkerCounter.HANDSHAKES_UNREACHABLE),
    ],
)
def test_each_failure_of_a_handshake_has_its_counter(kind: type[ServingError], counter: WorkerCounter) -> None:
    """Rule 13: a mismatch is an error of the handshake, told from an owner that is gone."""
    assert handshake_failure(kind("why")) is counter
