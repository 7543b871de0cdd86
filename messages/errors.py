"""The one error tree; every error that leaves a process is one of these.

    ServingError                  INTERNAL
    |- InvalidRequest             INVALID_ARGUMENT
    |- ModelNotFound              NOT_FOUND
    |- Overloaded                 RESOURCE_EXHAUSTED   retryable
    |- Unavailable                UNAVAILABLE          retryable
    |  |- WorkerLost              UNAVAILABLE          retryable
    |  `- Draining                UNAVAILABLE          retryable
    |- DeadlineExceeded           DEADLINE_EXCEEDED
    |- RequestCancelled           CANCELLED
    |- OutOfBlocks                RESOURCE_EXHAUSTED   retryable
    |- HandoffError               FAILED_PRECONDITION  retryable
    |  |- HandoffUnknown          FAILED_PRECONDITION  retryable
    |  |- HandoffStale            FAILED_PRECONDITION  retryable
    |  `- LayoutMismatch          FAILED_PRECONDITION
    |- TransferError              UNAVAILABLE          retryable
    |  |- TransferTimeout         UNAVAILABLE          retryable
    |  `- PeerUnreachable         UNAVAILABLE          retryable
    |- NeedsPrefill               FAILED_PRECONDITION  retryable
    |- RegistryError              UNAVAILABLE          retryable
    |- ModelRefused               FAILED_PRECONDITION
    `- ConfigError                INVALID_ARGUMENT

`code` is a gRPC status name. `retryable` says whether the same request may be tried again on another worker
before its first token; the router and the SDK obey it and nothing else decides.
"""

from typing import ClassVar


class ServingError(Exception):
    """The root; carries a message for people and context for logs."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.context = context

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword context would be lost, and keyword-only signatures do not unpickle at all.
        return _rebuild, (type(self), self.message, self.context)

    def __str__(self) -> str:
        if not self.context:
            return self.message
        return f"{self.message} ({', '.join(f'{k}={v}' for k, v in self.context.items())})"


def _rebuild(kind: type[ServingError], message: str, context: dict[str, object]) -> ServingError:
    return kind(message, **context)


class InvalidRequest(ServingError):
    """A field of the request is wrong; `param` in the context names it."""

    code = "INVALID_ARGUMENT"


class ModelNotFound(ServingError):
    """No pool serves the model that the request names."""

    code = "NOT_FOUND"


class Overloaded(ServingError):
    """A bounded queue is full; try later."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True


class Unavailable(ServingError):
    """No healthy worker can take the request now."""

    code = "UNAVAILABLE"
    retryable = True


class WorkerLost(Unavailable):
    """The worker died or its link broke while it held the request."""


class Draining(Unavailable):
    """The worker takes no new work because it is about to stop."""


class DeadlineExceeded(ServingError):
    """The request's time is over."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelled(ServingError):
    """The client went away or aborted."""

    code = "CANCELLED"


class OutOfBlocks(ServingError):
    """Not enough free KV blocks; nothing was taken."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True


class HandoffError(ServingError):
    """A hand-off cannot go on."""

    code = "FAILED_PRECONDITION"
    retryable = True


class HandoffUnknown(HandoffError):
    """The owner holds no such hand-off: never granted, released or expired."""


class HandoffStale(HandoffError):
    """Incarnation, generation or block key differ from what the owner holds now."""


class LayoutMismatch(HandoffError):
    """The two sides lay KV out differently; bytes would be misread."""

    retryable = False


class TransferError(ServingError):
    """Bytes did not arrive."""

    code = "UNAVAILABLE"
    retryable = True


class TransferTimeout(TransferError):
    """A read passed its deadline."""


class PeerUnreachable(TransferError):
    """The owner of the blocks does not answer."""


class NeedsPrefill(ServingError):
    """More prompt tokens are uncached on this worker than the caller lets it compute."""

    code = "FAILED_PRECONDITION"
    retryable = True


class RegistryError(ServingError):
    """A shard of the registry failed; callers treat what it holds as unknown."""

    code = "UNAVAILABLE"
    retryable = True


class ModelRefused(ServingError):
    """The model cannot be served right; the message says why."""

    code = "FAILED_PRECONDITION"


class ConfigError(ServingError):
    """A setting is wrong; the message names it and says what to do."""

    code = "INVALID_ARGUMENT"
