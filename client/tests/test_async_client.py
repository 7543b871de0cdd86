"""The asyncio client against a real grpc.aio server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import kvferry
from kvferry import AsyncClient, AsyncStream, InvalidRequest, Sampling, StreamBroken
from kvferry.requests import make_sampling
from kvferry.results import prompt_logprobs_of
from kvferry.testing import Answer, FakeServer
from kvferry.v1 import inference_pb2 as v1


async def test_stream_yields_the_pieces_and_then_has_the_result() -> None:
    async with (
        FakeServer(Answer("Hel", "lo", reason="length")) as server,
        AsyncClient(server.target) as client,
        client.stream("a b c") as chunks,
    ):
        pieces = [str(chunk) async for chunk in chunks]

    assert pieces == ["Hel", "lo"]
    assert chunks.result.text == "Hello"
    assert chunks.result.token_ids == (0, 1)
    assert chunks.result.finish_reason == "length"
    assert chunks.result.stop is None
    assert chunks.result.usage == kvferry.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)
    assert chunks.result.request_id == chunks.request_id == "fake-1"


async def test_generate_waits_for_the_whole_text() -> None:
    async with FakeServer(Answer("One", " two", stop="###")) as server, AsyncClient(server.target) as client:
        completion = await client.generate("Count")

    assert str(completion) == "One two"
    assert completion.finish_reason == "stop"
    assert completion.stop == "###"


async def test_chat_sends_every_turn() -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello there"}]

    async with FakeServer() as server, AsyncClient(server.target) as client:
        completion = await client.chat(turns, model="demo")

    assert completion.text == "Hello there"
    assert server.requests == [
        v1.ChatRequest(model="demo", messages=[v1.ChatMessage(**t) for t in turns], sampling=v1.SamplingParams())
    ]


async def test_every_sampling_parameter_reaches_the_server() -> None:
    numbers: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "n": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.25,
        "seed": 2**63,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 2.0,
        "logprobs": 0,
        "prompt_logprobs": 3,
        "priority": -5,
        "ignore_eos": True,
        "include_stop_str_in_output": False,
    }
    lists: dict[str, Any] = {"bad_words": ["x"], "stop_token_ids": [5], "logit_bias": {3: -1.5}}

    async with FakeServer() as server, AsyncClient(server.target) as client:
        await client.generate(
            [1, 2, 3], model="m", stop="END", allowed_token_ids=[8, 9], regex="a+", echo=True, **numbers, **lists
        )

    (request,) = server.requests
    assert isinstance(request, v1.GenerateRequest)
    assert list(request.token_ids.ids) == [1, 2, 3]
    assert request.model == "m"
    assert request.echo
    assert request.sampling == v1.SamplingParams(
        stop=["END"], allowed_token_ids=v1.TokenIds(ids=[8, 9]), grammar=v1.Grammar(regex="a+"), **numbers, **lists
    )
    assert set(request.sampling.DESCRIPTOR.fields_by_name) == {field.name for field, _ in request.sampling.ListFields()}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json_schema": {"type": "object"}}, v1.Grammar(json_schema='{"type": "object"}')),
        ({"json_schema": '{"type":"array"}'}, v1.Grammar(json_schema='{"type":"array"}')),
        ({"json_object": True}, v1.Grammar(json_object=v1.JsonObject())),
        ({"json_object": False}, None),
        ({"json_object": False, "regex": "x"}, v1.Grammar(regex="x")),
        ({"choice": ["a", "b"]}, v1.Grammar(choice=v1.Texts(texts=["a", "b"]))),
        ({"choice": None}, None),
    ],
)
def test_a_grammar_is_sent_as_what_it_is(given: Sampling, grammar: v1.Grammar | None) -> None:
    assert make_sampling(**given) == v1.SamplingParams(grammar=grammar)


def test_two_grammars_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="regex and choice"):
        make_sampling(regex="a", choice=["a"])


async def test_every_choice_has_its_chunks_its_text_and_its_finish() -> None:
    async with (
        FakeServer(Answer("Hel", "lo", stop=13)) as server,
        AsyncClient(server.target) as client,
        client.stream("a b", n=2, logprobs=1, echo=True) as chunks,
    ):
        pieces = [(chunk.choice, str(chunk)) async for chunk in chunks]

    assert pieces == [(0, "a bHel"), (1, "a bHel"), (0, "lo"), (1, "lo")]
    completion = chunks.result
    assert [choice.text for choice in completion.choices] == ["a bHello", "a bHello"]
    assert [choice.token_ids for choice in completion.choices] == [(0, 1), (0, 1)]
    assert {(choice.finish_reason, choice.stop) for choice in completion.choices} == {("stop", 13)}
    assert (completion.text, completion.token_ids, completion.stop) == ("a bHello", (0, 1), 13)
    assert completion.usage.completion_tokens == 4
    assert completion.logprobs == completion.choices[1].logprobs
    assert completion.logprobs[1] == kvferry.TokenLogprob(token_id=1, text="lo", text_bytes=b"lo", logprob=-1.0)


def test_log_probabilities_of_the_prompt_are_gathered_from_all_messages() -> None:
    top = v1.TokenLogprob(token_id=2, logprob=-0.25, text="b")
    known = v1.TokenLogprob(token_id=1, logprob=-0.5, text="a", text_bytes=b"a", top=[top])

    first, second = prompt_logprobs_of([v1.TokenLogprob(), known])

    assert first is None
    assert second is not None
    assert (second.token_id, second.logprob, [other.text for other in second.top]) == (1, -0.5, ["b"])


async def test_a_choice_without_its_finish_is_a_broken_stream() -> None:
    messages = [
        v1.GenerateChunk(text="a", token_ids=[1]),
        v1.GenerateChunk(choice=1, text="b", finish=v1.Finish(), summary=v1.Summary()),
    ]

    async with AsyncStream(lambda: _Call(messages)) as chunks:
        assert (await anext(chunks)).text == "a"
        with pytest.raises(StreamBroken, match="finish of every choice") as raised:
            await anext(chunks)

    assert raised.value.partial_text == "a"


class _Call:
    """Messages of a call that is under way."""

    def __init__(self, messages: list[v1.GenerateChunk]) -> None:
        self._messages = messages

    async def __aiter__(self) -> AsyncIterator[v1.GenerateChunk]:
        for message in self._messages:
            yield message

    def cancel(self) -> bool:
        return True


async def test_a_parameter_left_out_is_not_sent() -> None:
    async with FakeServer() as server, AsyncClient(server.target) as client:
        await client.generate("x", max_tokens=None)

    assert not server.requests[0].sampling.ListFields()


async def test_leaving_the_block_early_cancels_the_call_on_the_server() -> None:
    async with FakeServer(Answer("first", held=True)) as server, AsyncClient(server.target) as client:
        async with client.stream("x") as chunks:
            async for chunk in chunks:
                assert chunk.text == "first"
                break

        assert await asyncio.to_thread(server.wait_until_idle)
        assert server.num_cancelled == 1


async def test_an_error_inside_the_block_cancels_the_call_and_passes() -> None:
    async def fail_inside(client: AsyncClient) -> None:
        async with client.stream("x") as chunks:
            await anext(chunks)
            raise ZeroDivisionError

    async with FakeServer(Answer("first", held=True)) as server, AsyncClient(server.target) as client:
        with pytest.raises(ZeroDivisionError):
            await fail_inside(client)

        assert await asyncio.to_thread(server.wait_until_idle)
        assert server.num_cancelled == 1


async def test_cancelling_the_task_cancels_the_call_and_stays_a_cancellation() -> None:
    is_streaming = asyncio.Event()

    async def consume(client: AsyncClient) -> None:
        async with client.stream("x") as chunks:
            async for _ in chunks:
                is_streaming.set()

    async with FakeServer(Answer("first", held=True)) as server, AsyncClient(server.target) as client:
        task = asyncio.create_task(consume(client))
        await is_streaming.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert await asyncio.to_thread(server.wait_until_idle)
        assert server.num_cancelled == 1


async def test_a_stream_read_to_its_end_is_not_cancelled() -> None:
    async with FakeServer() as server, AsyncClient(server.target) as client:
        await client.generate("a b")

        assert await asyncio.to_thread(server.wait_until_idle)
        assert server.num_cancelled == 0


async def test_several_streams_share_a_client() -> None:
    async with FakeServer() as server, AsyncClient(server.target) as client:
        completions = await asyncio.gather(*(client.generate(f"number {n}") for n in range(20)))

    assert [c.text for c in completions] == [f"number {n}" for n in range(20)]


def test_a_client_made_outside_a_loop_says_so_at_once() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient("127.0.0.1:1")


async def test_a_stream_outside_its_block_is_refused() -> None:
    async with FakeServer() as server, AsyncClient(server.target) as client:
        stream = client.stream("x")

        with pytest.raises(RuntimeError, match="async with"):
            await anext(stream)


async def test_a_stream_is_used_once() -> None:
    async with FakeServer() as server, AsyncClient(server.target) as client:
        stream = client.stream("x")
        async with stream:
            pass

        with pytest.raises(RuntimeError, match="once"):
            await stream.__aenter__()


async def test_the_result_is_not_there_before_the_end() -> None:
    async with (
        FakeServer(Answer("a", "b")) as server,
        AsyncClient(server.target) as client,
        client.stream("x") as chunks,
    ):
        await anext(chunks)

        with pytest.raises(RuntimeError, match="before its end"):
            _ = chunks.result


async def test_models_lists_what_is_served() -> None:
    async with FakeServer(models=(("demo", 8192),)) as server, AsyncClient(server.target) as client:
        models = await client.models()

    assert models == [kvferry.ModelCard(name="demo", context_length=8192)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": [-1]},
        {"prompt": [2**32]},
        {"prompt": "x", "seed": -1},
        {"prompt": "x", "max_tokens": 2**31},
        {"prompt": "x", "stop_token_ids": [-1]},
        {"prompt": "x", "allowed_token_ids": [-1]},
        {"prompt": "x", "logit_bias": {-1: 1.0}},
        {"prompt": "x", "regex": "\ud800"},
    ],
)
async def test_what_the_contract_cannot_carry_is_an_invalid_request(arguments: dict[str, object]) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest):
            client.stream(**arguments)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("turn", [{"role": "user"}, {"role": "user", "content": "x", "name": "y"}])
async def test_a_turn_with_other_fields_is_an_invalid_request(turn: dict[str, str]) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match=r"messages\[0\]"):
            client.stream_chat([turn])


async def test_an_unknown_parameter_is_a_type_error() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="best_of"):
            client.stream("x", best_of=2)  # type: ignore[call-arg]  # wrong on purpose
