"""What can go wrong, as one tree; the gRPC status of a failed call decides the class.

    KVFerryError                                                        |
    |- InvalidRequest     INVALID_ARGUMENT, OUT_OF_RANGE                |
    |- NotFound           NOT_FOUND                                     |
    |- NotAllowed         UNAUTHENTICATED, PERMISSION_DENIED            |
    |- Refused            FAILED_PRECONDITION                           |
    |- Unsupported        UNIMPLEMENTED                                 |
    |- Overloaded         RESOURCE_EXHAUSTED                            | retryable
    |- Unavailable        UNAVAILABLE                                   | retryable
    |- DeadlineExceeded   DEADLINE_EXCEEDED                             |
    |- Cancelled          CANCELLED                                     |
    |- StreamBroken                                                     | retryable
    `- InternalError      INTERNAL, UNKNOWN, ABORTED, DATA_LOSS, ...    |

`retryable` says that the same call may succeed when it is made again. The text that had arrived before the failure
is in `partial_text`; a retry starts from the beginning, so a caller that has shown it must take it back.
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class KVFerryError(Exception):
    """The root of every error that this package raises about a call."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, partial_text: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.partial_text = partial_text
        """Text of choice 0 that had arrived before the failure."""

    def __reduce__(self) -> tuple[object, ...]:
        # The keyword-only argument would be lost on the way through a process pool.
        return _rebuild, (type(self), self.message, self.partial_text)


def _rebuild(kind: type[KVFerryError], message: str, partial_text: str) -> KVFerryError:
    return kind(message, partial_text=partial_text)


class InvalidRequest(KVFerryError):
    """A part of the request is wrong; the message names it."""


class NotFound(KVFerryError):
    """No such model is served."""


class NotAllowed(KVFerryError):
    """The server does not know the caller, or does not let it do this."""


class Refused(KVFerryError):
    """The server cannot serve this request in its present state."""


class Unsupported(KVFerryError):
    """The server does not have this call; it is older than this client, or no KVFerry."""


class Overloaded(KVFerryError):
    """The server's queues are full; try again later."""

    retryable = True


class Unavailable(KVFerryError):
    """No server answers, or none of its workers can take the request now."""

    retryable = True


class DeadlineExceeded(KVFerryError):
    """The call's `timeout_s` is over."""


class Cancelled(KVFerryError):
    """The server cancelled the call."""


class StreamBroken(KVFerryError):
    """The stream ended without its last chunk; the text is incomplete."""

    retryable = True


class InternalError(KVFerryError):
    """The server failed; a fault of the server, not of the request."""


ERROR_OF_STATUS: dict[grpc.StatusCode, type[KVFerryError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}
"""A status that is not here is an InternalError."""


def error_of_call(failure: grpc.RpcError, *, partial_text: str = "") -> KVFerryError:
    """Translate what grpc raised into the tree above."""
    # Both the sync and the asyncio API raise objects with these methods; the annotated root class has none.
    code, details = failure.code(), failure.details()
    kind = ERROR_OF_STATUS.get(code, InternalError)
    return kind(details or code.name, partial_text=partial_text)
