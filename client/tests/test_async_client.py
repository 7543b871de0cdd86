"""The asyncio client against a real grpc.aio server."""

import asyncio

import pytest

import kvferry
from kvferry import AsyncClient, InvalidRequest
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
    async with FakeServer() as server, AsyncClient(server.target) as client:
        await client.generate(
            [1, 2, 3], model="m", max_tokens=7, temperature=0.0, top_p=0.5, top_k=4, seed=2**63, stop="END"
        )

    (request,) = server.requests
    assert isinstance(request, v1.GenerateRequest)
    assert list(request.token_ids.ids) == [1, 2, 3]
    assert request.model == "m"
    assert request.sampling == v1.SamplingParams(
        max_tokens=7, temperature=0.0, top_p=0.5, top_k=4, seed=2**63, stop=["END"]
    )


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
    [{"prompt": [-1]}, {"prompt": [2**32]}, {"prompt": "x", "seed": -1}, {"prompt": "x", "max_tokens": 2**31}],
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
