"""The error tree: drawn as it is, and met through real failed calls."""

import pickle
import re

import grpc
import pytest

from kvferry import (
    AsyncClient,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVFerryError,
    NotAllowed,
    NotFound,
    Overloaded,
    Refused,
    StreamBroken,
    Unavailable,
    Unsupported,
    errors,
)
from kvferry.testing import Answer, FakeServer

LEAVES = [
    InvalidRequest,
    NotFound,
    NotAllowed,
    Refused,
    Unsupported,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    Cancelled,
    StreamBroken,
    InternalError,
]
DRAWN = re.compile(r"^    (?:\|-|`-) (\w+) +([^|]*?) *\|( retryable)?$", re.MULTILINE)


def test_the_drawing_equals_the_classes() -> None:
    drawn = {name: (codes, bool(retryable)) for name, codes, retryable in DRAWN.findall(errors.__doc__ or "")}

    assert list(drawn) == [kind.__name__ for kind in KVFerryError.__subclasses__()]
    assert {name: retryable for name, (_, retryable) in drawn.items()} == {k.__name__: k.retryable for k in LEAVES}
    for code, kind in errors.ERROR_OF_STATUS.items():
        assert code.name in drawn[kind.__name__][0].split(", ")


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if kind is not StreamBroken])
async def test_a_failed_stream_raises_its_class_with_what_had_arrived(kind: type[KVFerryError]) -> None:
    async with FakeServer(Answer("par", "tial", error=kind("why"))) as server, AsyncClient(server.target) as client:
        with pytest.raises(KVFerryError) as caught:
            await client.generate("x")

    assert type(caught.value) is kind
    assert caught.value.message == "why"
    assert caught.value.partial_text == "partial"
    assert isinstance(caught.value.__cause__, grpc.RpcError)


async def test_a_stream_without_a_finish_is_broken() -> None:
    async with FakeServer(Answer("half", broken=True)) as server, AsyncClient(server.target) as client:
        with pytest.raises(StreamBroken) as caught:
            await client.generate("x")

    assert caught.value.partial_text == "half"
    assert caught.value.retryable


@pytest.mark.parametrize("per_call", [True, False])
async def test_a_deadline_of_the_call_or_of_the_client_ends_a_stream(*, per_call: bool) -> None:
    client_s, call_s = (60.0, 0.2) if per_call else (0.2, None)

    async with FakeServer(Answer("a", held=True)) as server, AsyncClient(server.target, timeout_s=client_s) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            await client.generate("x", timeout_s=call_s)

    assert caught.value.partial_text == "a"


async def test_nobody_listening_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.models()


@pytest.mark.parametrize("kind", LEAVES)
def test_errors_survive_pickling(kind: type[KVFerryError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("why", partial_text="half")))

    assert type(copy) is kind
    assert (copy.message, copy.partial_text, str(copy)) == ("why", "half", "why")
