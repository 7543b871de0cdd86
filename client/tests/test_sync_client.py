"""The generated sync client: the same promises, without an event loop."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry import Client, DeadlineExceeded, Overloaded, StreamBroken, Unavailable
from kvferry.testing import Answer, FakeServer


def test_stream_yields_the_pieces_and_then_has_the_result() -> None:
    with (
        FakeServer(Answer("Hel", "lo")) as server,
        Client(server.target) as client,
        client.stream("a b c") as chunks,
    ):
        pieces = [str(chunk) for chunk in chunks]

    assert pieces == ["Hel", "lo"]
    assert chunks.result.text == "Hello"
    assert chunks.result.usage.prompt_tokens == 3


def test_chat_and_models_answer() -> None:
    with FakeServer(models=(("demo", 8192),)) as server, Client(server.target) as client:
        completion = client.chat([{"role": "user", "content": "Hello there"}], max_tokens=5)
        models = client.models()

    assert completion.text == "Hello there"
    assert [model.name for model in models] == ["demo"]


def test_leaving_the_block_early_cancels_the_call_on_the_server() -> None:
    with FakeServer(Answer("first", held=True)) as server, Client(server.target) as client:
        with client.stream("x") as chunks:
            next(chunks)

        assert server.wait_until_idle()
        assert server.num_cancelled == 1
        with pytest.raises(RuntimeError, match="inside its `with` block"):
            next(chunks)


def test_a_failing_stream_raises_the_typed_error_with_what_had_arrived() -> None:
    answers = (Answer("Hel", "lo", error=Overloaded("busy")), Answer("Hi", broken=True), Answer("Yo", held=True))

    with FakeServer(*answers) as server, Client(server.target) as client:
        with pytest.raises(Overloaded, match="busy") as overloaded:
            client.generate("x")
        with pytest.raises(StreamBroken) as broken:
            client.generate("x")
        with pytest.raises(DeadlineExceeded) as late:
            client.generate("x", timeout_s=0.2)

    assert [info.value.partial_text for info in (overloaded, broken, late)] == ["Hello", "Hi", "Yo"]


def test_nobody_listening_is_unavailable() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable) as error:
        client.models()

    assert error.value.retryable


def test_threads_share_a_client() -> None:
    with FakeServer() as server, Client(server.target) as client, ThreadPoolExecutor(8) as pool:
        completions = list(pool.map(lambda n: client.generate(f"number {n}"), range(20)))

    assert [c.text for c in completions] == [f"number {n}" for n in range(20)]


def test_closing_the_fake_server_ends_its_thread() -> None:
    with FakeServer():
        pass

    assert not [thread for thread in threading.enumerate() if thread.name == "kvferry-fake-server"]
