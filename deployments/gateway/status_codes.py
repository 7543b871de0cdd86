"""What a client sees of an error: gRPC status, HTTP status and the OpenAI error object, from one table."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from messages.errors import ServingError

log = logging.getLogger(__name__)

MAX_DETAILS_BYTES = 4096
DEFAULT_RETRY_AFTER_S = 1

_HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}
_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


@contextmanager
def translate_unexpected() -> Iterator[None]:
    """Turn what is no ServingError into one that tells nothing of our inside; the log gets the cause."""
    try:
        yield
    except ServingError:
        raise
    except Exception as error:
        log.exception("request.crashed")
        raise ServingError("internal error") from error


def grpc_status(error: ServingError) -> grpc.StatusCode:
    """The gRPC status of `error`."""
    return grpc.StatusCode[error.code]


def details(error: ServingError) -> str:
    """The message for the client, at most 4 KB of UTF-8; the context stays in our logs."""
    data = error.message.encode(errors="replace")
    if len(data) <= MAX_DETAILS_BYTES:
        return data.decode()
    ellipsis = "..."
    return data[: MAX_DETAILS_BYTES - len(ellipsis)].decode(errors="ignore") + ellipsis


def http_status(error: ServingError) -> int:
    """The HTTP status of `error`."""
    if error.code == "FAILED_PRECONDITION":
        # A hand-off that failed may work on another worker; a refused model will not.
        return 503 if error.retryable else 500
    return _HTTP_STATUS[error.code]


def http_headers(error: ServingError) -> dict[str, str]:
    """Retry-After, in whole seconds, where the same request may succeed later."""
    if http_status(error) not in (429, 503):
        return {}
    wait_s = error.context.get("retry_after_s", DEFAULT_RETRY_AFTER_S)
    return {"retry-after": str(max(1, round(wait_s)) if isinstance(wait_s, int | float) else DEFAULT_RETRY_AFTER_S)}


def openai_error(error: ServingError) -> dict[str, Any]:
    """The body that OpenAI clients expect; `param` and `reason` come from the error's context."""
    status = http_status(error)
    param, reason = error.context.get("param"), error.context.get("reason")
    return error_body(
        details(error),
        kind=_TYPES.get(status, "server_error"),
        param=None if param is None else str(param),
        code=_snake_case(type(error).__name__) if reason is None else str(reason),
    )


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An OpenAI error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _snake_case(name: str) -> str:
    return _WORD_START.sub("_", name).lower()
