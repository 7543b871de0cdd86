"""Every error of the tree has a gRPC and an HTTP status, and tells the client no secrets."""

import logging
from collections.abc import Iterator

import grpc
import pytest

from deployments.gateway.status_codes import (
    MAX_DETAILS_BYTES,
    details,
    grpc_status,
    http_headers,
    http_status,
    openai_error,
    translate_unexpected,
)
from messages import errors
from messages.errors import (
    HandoffStale,
    InvalidRequest,
    LayoutMismatch,
    ModelNotFound,
    Overloaded,
    ServingError,
    WorkerLost,
)


def all_kinds(root: type[ServingError] = ServingError) -> Iterator[type[ServingError]]:
    yield root
    for kind in root.__subclasses__():
        yield from all_kinds(kind)


@pytest.mark.parametrize("kind", list(all_kinds()))
def test_every_error_has_both_statuses(kind: type[ServingError]) -> None:
    error = kind("message")

    assert grpc_status(error).name == kind.code
    assert 400 <= http_status(error) <= 599
    assert not (kind.retryable and http_status(error) in (400, 404, 500))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("x"), 400),
        (ModelNotFound("x"), 404),
        (Overloaded("x"), 429),
        (WorkerLost("x"), 503),
        (HandoffStale("x"), 503),
        (LayoutMismatch("x"), 500),
        (errors.DeadlineExceeded("x"), 504),
        (ServingError("x"), 500),
    ],
)
def test_http_status_of_an_error(error: ServingError, expected: int) -> None:
    assert http_status(error) == expected


def test_retry_after_goes_with_errors_that_pass() -> None:
    assert http_headers(Overloaded("x")) == {"retry-after": "1"}
    assert http_headers(Overloaded("x", retry_after_s=4.6)) == {"retry-after": "5"}
    assert http_headers(WorkerLost("x", retry_after_s=0.1)) == {"retry-after": "1"}
    assert http_headers(InvalidRequest("x")) == {}


def test_the_openai_error_carries_param_and_code_but_no_context() -> None:
    refused = openai_error(
        InvalidRequest("n is not supported", param="n", reason="unsupported_parameter", worker="10.0.0.3")
    )

    assert refused == {
        "error": {
            "message": "n is not supported",
            "type": "invalid_request_error",
            "param": "n",
            "code": "unsupported_parameter",
        }
    }
    assert openai_error(ModelNotFound("x", param="model"))["error"]["code"] == "model_not_found"
    assert openai_error(Overloaded("x"))["error"]["type"] == "rate_limit_error"
    assert openai_error(WorkerLost("x"))["error"]["type"] == "server_error"


def test_details_are_at_most_4_kb_of_utf8_and_split_no_character() -> None:
    long = details(ServingError("é" * 5000))

    assert len(long.encode()) <= MAX_DETAILS_BYTES
    assert long.rstrip(".") == "é" * (len(long) - 3)
    assert details(ServingError("short")) == "short"
    assert details(ServingError("lone \ud800")) == "lone ?"


def test_an_unexpected_exception_becomes_internal_and_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ServingError) as raised,
        translate_unexpected(),
    ):
        raise ZeroDivisionError("secret")

    assert grpc_status(raised.value) is grpc.StatusCode.INTERNAL
    assert "secret" not in raised.value.message
    assert "secret" in caplog.text


def test_our_own_errors_pass_unchanged() -> None:
    with pytest.raises(Overloaded, match="full"), translate_unexpected():
        raise Overloaded("full")
