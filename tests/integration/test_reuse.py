"""A prefix that one worker holds is read by another instead of computed: right tokens, right counts, nothing left."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from messages.requests import Grammar, GrammarKind
from tests.integration.worker_group import WorkerGroup, warm
from tests.integration.worker_pair import BLOCK, VOCAB, golden, prompt, save_tiny_model

WINDOW = 12
TWO = {"a": "unified", "b": "unified"}
THREE = TWO | {"c": "unified"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        sliding_window=WINDOW,
        bos_token_id=1,
        eos_token_id=2,
    )
    place = tmp_path_factory.mktemp("windowed")
    MistralForCausalLM(config).save_pretrained(place)
    return place


@pytest.fixture
async def two(folder: Path) -> AsyncIterator[WorkerGroup]:
    async with WorkerGroup(folder, TWO) as group:
        yield group


def save_tokenizer(folder: Path) -> None:
    """One token per letter, as many as the model has."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocabulary = {letter: index + 3 for index, letter in enumerate(letters)} | {"w0": 0, "w1": 1, "w2": 2}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w2").save_pretrained(folder)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100])
async def test_b_reads_what_a_has_and_computes_the_rest(two: WorkerGroup, folder: Path, length: int) -> None:
    """Case 20 and rule 14: exactly what is counted is read, and the last token is always computed."""
    tokens = prompt(length)
    await warm(two, "a", tokens)
    held = (length - 1) // BLOCK * BLOCK

    answer = await two.run_on("b", tokens, two.source("a", length // BLOCK))

    assert answer.tokens[0] == await golden(folder, tokens)
    assert (answer.cached_tokens, answer.done.reused_tokens) == (held, held)
    assert answer.done.computed_prompt_tokens == length - held >= 1
    assert list(answer.done.reused_from) == (["a"] if held else [])
    assert answer.done.blocks_moved == held // BLOCK
    await two.until_baseline()
    again = await two.run_on("b", tokens, name="again")
    assert (again.tokens, again.cached_tokens, again.done.reused_tokens) == (answer.tokens, held, 0)


async def test_only_what_is_missing_is_read(two: WorkerGroup, folder: Path) -> None:
    tokens = prompt(60)
    await warm(two, "a", tokens)
    await warm(two, "b", tokens[:25])

    answer = await two.run_on("b", tokens, two.source("a", 7))

    assert answer.tokens[0] == await golden(folder, tokens)
    assert (answer.cached_tokens, answer.done.reused_tokens, answer.done.computed_prompt_tokens) == (56, 32, 4)
    await two.until_baseline()
    assert two.counter("b", "prompt_tokens_remote_cache_total") == 32
    assert two.counter("b", "prompt_tokens_local_cache_total") == 24
    assert two.counter("b", "prompt_tokens_computed_total") == 25 + 4
    assert two.counter("b", "prompt_tokens_transferred_total") == 0
    assert two.counter("a", "lends_total") == 1


async def test_what_was_borrowed_is_published_and_lent_on(folder: Path) -> None:
    tokens = prompt(60)
    async with WorkerGroup(folder, THREE) as group:
        await warm(group, "a", tokens)
        await group.run_on("b", tokens, group.source("a", 7))

        answer = await group.run_on("c", tokens, group.source("b", 7), name="third")

        assert answer.tokens[0] == await golden(folder, tokens)
        assert list(answer.done.reused_from) == ["b"]
        await group.until_baseline()


async def test_the_router_sends_the_prefix_along_when_its_holder_is_busy(two: WorkerGroup, folder: Path) -> None:
    """Case 17: the first answer has no cached tokens, the second has the full blocks, wherever they were."""
    tokens = prompt(87)
    first, route = await two.ask(tokens, name="first")
    holder = route.provenance.decode_worker
    (other,) = {"a", "b"} - {holder}
    await asyncio.sleep(0.2)
    async with two.submitted(holder, prompt(9, seed=3), name="busy", max_tokens=200, end_token_ids=()):
        await two.until(lambda: two.sample(holder).running == 1)

        second, again = await two.ask(tokens, name="second")

    assert first == second == await golden(folder, tokens)
    assert (route.cached_tokens, again.cached_tokens) == (0, 80)
    assert (again.provenance.decode_worker, again.provenance.reused_from) == (other, (holder,))
    assert (again.provenance.reused_tokens, again.provenance.decode_computed_tokens) == (80, 7)
    assert two.router.metrics.registry.get_sample_value("kvferry_router_reuse_total", {"verdict": "fetch"}) == 1
    await two.until_baseline()


async def test_a_prefix_is_not_fetched_where_computing_is_cheaper(folder: Path) -> None:
    async with WorkerGroup(folder, TWO, reuse={"min_tokens": 1000}) as group:
        tokens = prompt(87)
        await warm(group, "a", tokens)
        await asyncio.sleep(0.2)
        async with AsyncExitStack() as busy:
            for seed in (3, 4, 5):
                work = group.submitted("a", prompt(9, seed), name=f"busy{seed}", max_tokens=250, end_token_ids=())
                await busy.enter_async_context(work)
            await group.until(lambda: group.sample("a").running == 3)

            got, route = await group.ask(tokens, name="second")

        assert got == await golden(folder, tokens)
        assert (route.provenance.decode_worker, route.provenance.reused_tokens, route.cached_tokens) == ("b", 0, 0)
        await group.until_baseline()


async def test_two_owners_give_a_part_each(folder: Path) -> None:
    async with WorkerGroup(folder, THREE) as group:
        tokens = prompt(100)
        await warm(group, "a", tokens)
        await warm(group, "b", tokens[:41])

        answer = await group.run_on("c", tokens, group.source("a", 12), group.source("b", 5))

        assert answer.tokens[0] == await golden(folder, tokens)
        assert list(answer.done.reused_from) == ["b", "a"]
        assert (answer.done.reused_tokens, answer.done.blocks_moved) == (96, 12)
        await group.until_baseline()


@pytest.mark.parametrize("length", [7, 16, 17, 40, 41, 100])
async def test_a_model_with_a_window_reads_only_what_the_window_sees(windowed: Path, length: int) -> None:
    async with WorkerGroup(windowed, TWO, fuse_layers=False) as group:
        tokens = prompt(length)
        await warm(group, "a", tokens)
        held = (length - 1) // BLOCK * BLOCK

        answer = await group.run_on("b", tokens, group.source("a", length // BLOCK))

        assert answer.tokens[0] == await golden(windowed, tokens)
        assert answer.done.reused_tokens == held
        # A hit needs the blocks that cover its last tokens, and no others.
        assert answer.done.blocks_moved <= -(-WINDOW // BLOCK) + 1
        for shorter in (20, 33, 60):
            part = await group.run_on("b", tokens[:shorter], name=f"part{shorter}")
            assert part.tokens[0] == await golden(windowed, tokens[:shorter])
        await group.until_baseline()


async def test_choices_share_what_was_borrowed(two: WorkerGroup) -> None:
    tokens = prompt(60)
    await warm(two, "a", tokens)
    whole = {"n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 12}
    expected = await two.run_on("a", tokens, name="expected", **whole)

    answer = await two.run_on("b", tokens, two.source("a", 7), **whole)

    assert answer.tokens == expected.tokens
    assert len({tuple(choice) for choice in answer.tokens.values()}) == 3
    assert answer.done.reused_tokens == 56
    await two.until_baseline()


async def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole(two: WorkerGroup, folder: Path) -> None:
    tokens = prompt(60)
    await warm(two, "a", tokens)

    answer = await two.run_on("b", tokens, two.source("a", 7), prompt_logprobs=1)

    assert answer.tokens[0] == await golden(folder, tokens)
    assert (answer.num_logprobs, answer.done.computed_prompt_tokens) == (60, 60)
    assert two.counter("a", "lends_total") == 0
    await two.until_baseline()


async def test_a_worker_lends_no_more_than_it_is_told_to(folder: Path) -> None:
    async with WorkerGroup(folder, TWO, reuse={"max_lends": 0}) as group:
        tokens = prompt(60)
        await warm(group, "a", tokens)

        answer = await group.run_on("b", tokens, group.source("a", 7))

        assert answer.tokens[0] == await golden(folder, tokens)
        assert answer.done.reused_tokens == 0
        await group.until_baseline()


async def test_a_system_that_moves_no_prefixes_neither_lends_nor_borrows(folder: Path) -> None:
    async with WorkerGroup(folder, TWO, reuse={"enabled": False}) as group:
        tokens = prompt(60)
        await warm(group, "a", tokens)

        answer = await group.run_on("b", tokens, group.source("a", 7))

        assert answer.done.computed_prompt_tokens == 60
        await group.until_baseline()
        assert group.counter("a", "lends_refused_total") == 0


async def test_a_prefill_worker_borrows_and_hands_off_the_whole(folder: Path) -> None:
    roles = {"p1": "prefill", "p2": "prefill", "d": "decode"}
    async with WorkerGroup(folder, roles) as group:
        tokens = prompt(100)
        shared = tokens[:81]
        _, first = await group.ask(shared, name="first", max_tokens=1)
        holder = first.provenance.prefill_worker
        (other,) = {"p1", "p2"} - {holder}
        await asyncio.sleep(0.2)
        async with group.submitted(holder, prompt(9, seed=3), name="busy", max_tokens=250, end_token_ids=()):
            await group.until(lambda: group.sample(holder).running == 1)

            got, route = await group.ask(tokens, name="second")

        assert got == await golden(folder, tokens)
        assert (route.provenance.prefill_worker, route.provenance.reused_from) == (other, (holder,))
        assert (route.provenance.reused_tokens, route.provenance.prefill_computed_tokens) == (80, 20)
        assert route.cached_tokens == 80
        assert route.provenance.decode_computed_tokens <= BLOCK
        await group.until_baseline()


async def test_a_decode_worker_fetches_what_it_lacks_and_computes_the_short_rest(folder: Path) -> None:
    """Without a prefill at all: what the local limit allows is what is left after the fetch."""
    async with WorkerGroup(folder, {"p": "prefill", "d": "decode"}) as group:
        tokens = prompt(86)
        await group.ask(tokens[:81], name="first", max_tokens=1)
        await asyncio.sleep(0.2)

        got, route = await group.ask(tokens, name="second")

        assert got == await golden(folder, tokens)
        assert (route.provenance.prefill_worker, route.provenance.reused_from) == ("", ("p",))
        assert (route.provenance.reused_tokens, route.provenance.decode_computed_tokens) == (80, 6)
        await group.until_baseline()


async def test_a_decode_worker_whose_fetch_fails_asks_for_a_prefill(folder: Path) -> None:
    async with WorkerGroup(folder, {"p": "prefill", "d": "decode"}, reuse={"max_lends": 0}) as group:
        tokens = prompt(86)
        await group.ask(tokens[:81], name="first", max_tokens=1)
        await asyncio.sleep(0.2)

        got, route = await group.ask(tokens, name="second")

        assert got == await golden(folder, tokens)
        assert route.provenance.prefill_worker == "p"
        await group.until_baseline()


async def test_many_at_once_borrow_from_each_other(folder: Path) -> None:
    prompts = [prompt(70)[:60] + prompt(5 + number, seed=number) for number in range(10)]
    async with WorkerGroup(folder, THREE, num_blocks=48) as group:
        await warm(group, "a", prompts[0])
        await asyncio.sleep(0.2)
        started_s = time.monotonic()

        answers = await asyncio.gather(
            *(group.ask(tokens, max_tokens=12, name=f"r{number}") for number, tokens in enumerate(prompts))
        )

        assert [tokens for tokens, _ in answers] == [await golden(folder, tokens, 12) for tokens in prompts]
        assert time.monotonic() - started_s < 30
        await group.until_baseline()


async def test_a_grammar_holds_after_a_borrowed_prefix(folder: Path) -> None:
    save_tokenizer(folder)
    async with WorkerGroup(folder, TWO) as group:
        tokens = prompt(60)
        grammar = Grammar(kind=GrammarKind.REGEX, source="[ab]{3}")
        await warm(group, "a", tokens)
        expected = await group.run_on("a", tokens, name="expected", grammar=grammar)

        answer = await group.run_on("b", tokens, group.source("a", 7), grammar=grammar)

        assert answer.tokens == expected.tokens
        assert answer.done.reused_tokens == 56
        await group.until_baseline()
