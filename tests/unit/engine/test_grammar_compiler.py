"""Grammars are compiled once, elsewhere, and within bounds, whatever a stranger sends."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from engine.grammar import GrammarCompiler, GrammarLimits
from engine.grammar_source import library_source
from engine.grammar_trial import TrialProcess
from messages.errors import ConfigError, InvalidRequest, Overloaded
from messages.requests import Grammar, GrammarKind
from tests.unit.engine.tiny_grammars import WIDTH, make_folder, sample, text_of, tiny

ANY_OBJECT = Grammar(kind=GrammarKind.JSON_OBJECT)
BAD_REGEX = Grammar(kind=GrammarKind.REGEX, source="(a")
# Each alone is small; the library overflows its stack on the one and takes minutes for the other.
NUM_LINKS = 900
CHAIN = {f"d{link}": {"type": "array", "items": {"$ref": f"#/$defs/d{link + 1}"}} for link in range(NUM_LINKS)}
DEEP = Grammar(
    kind=GrammarKind.JSON_SCHEMA,
    source=json.dumps({"$defs": {**CHAIN, f"d{NUM_LINKS}": {"type": "null"}}, "$ref": "#/$defs/d0"}),
)
PATTERNS = {f"^k{number}_.*$": {"type": "integer"} for number in range(1000)}
SLOW = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps({"type": "object", "patternProperties": PATTERNS}))


def regex(source: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, source=source)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_compiler(folder: Path, limits: GrammarLimits | None = None, clock: Clock | None = None) -> GrammarCompiler:
    return GrammarCompiler(folder, WIDTH, tiny()[1].eos_ids, limits=limits, clock=clock or Clock())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def compiler(folder: Path) -> AsyncIterator[GrammarCompiler]:
    async with make_compiler(folder) as compiler:
        yield compiler


async def test_a_compiled_grammar_holds(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    matcher = await compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema)))

    jsonschema.validate(json.loads(text_of(sample(matcher, 3))), schema)


async def test_equal_grammars_are_compiled_once_and_their_matchers_are_apart(compiler: GrammarCompiler) -> None:
    matchers = await asyncio.gather(*(compiler.compile(ANY_OBJECT) for _ in range(5)))
    sample(matchers[0], 1)
    later = await compiler.compile(replace(ANY_OBJECT))

    assert (compiler.num_misses, compiler.num_hits, compiler.num_cached) == (1, 5, 1)
    assert not later.is_finished
    assert sample(later, 2) == sample(matchers[1], 2)


async def test_a_client_that_leaves_takes_nothing_from_the_others(compiler: GrammarCompiler) -> None:
    first = asyncio.create_task(compiler.compile(ANY_OBJECT))
    await asyncio.sleep(0)
    second = asyncio.create_task(compiler.compile(ANY_OBJECT))
    await asyncio.sleep(0)

    first.cancel()

    assert not (await second).is_finished
    assert compiler.num_misses == 1


async def test_a_refusal_is_remembered_for_a_while(folder: Path) -> None:
    clock = Clock()
    async with make_compiler(folder, clock=clock) as compiler:
        for _ in range(3):
            with pytest.raises(InvalidRequest, match="regex cannot be enforced: unclosed group"):
                await compiler.compile(BAD_REGEX)
        num_early = compiler.num_misses
        clock.now_s += 61.0
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await compiler.compile(BAD_REGEX)

        assert (num_early, compiler.num_misses) == (1, 2)


async def test_the_grammars_used_longest_ago_are_forgotten(folder: Path) -> None:
    async with make_compiler(folder, GrammarLimits(max_cached=2)) as compiler:
        for source in ("a", "b", "a", "c", "a", "b"):
            await compiler.compile(regex(source))

        assert compiler.num_cached == 2
        assert compiler.num_misses == 4


async def test_the_memory_of_remembered_grammars_is_bounded(folder: Path) -> None:
    async with make_compiler(folder, GrammarLimits(max_cached_bytes=3 << 20)) as compiler:
        for source in ("a", "b", "c", "d"):
            await compiler.compile(regex(source))

        assert compiler.num_cached == 2
        assert compiler.cached_bytes <= 3 << 20


async def test_more_grammars_than_may_wait_are_turned_away(folder: Path) -> None:
    async with make_compiler(folder, GrammarLimits(max_waiting=2)) as compiler:
        results = await asyncio.gather(*(compiler.compile(regex(f"a{n}")) for n in range(4)), return_exceptions=True)

        assert [isinstance(result, Overloaded) for result in results] == [False, False, True, True]


async def test_a_grammar_that_crashes_or_never_ends_harms_nobody(folder: Path) -> None:
    async with make_compiler(folder, GrammarLimits(compile_timeout_s=0.3)) as compiler:
        with pytest.raises(InvalidRequest, match="too complex to compile"):
            await compiler.compile(DEEP)
        with pytest.raises(InvalidRequest, match=r"more than 0\.3 s to compile"):
            await compiler.compile(SLOW)

        assert not (await compiler.compile(ANY_OBJECT)).is_finished


async def test_a_grammar_of_too_many_bytes_is_refused_before_anything_starts(folder: Path) -> None:
    async with make_compiler(folder, GrammarLimits(max_source_bytes=10)) as compiler:
        with pytest.raises(InvalidRequest, match="11 bytes, more than the 10") as raised:
            await compiler.compile(regex("aaaaaaaaaaa"))

        assert raised.value.context["param"] == "structured_outputs"
        assert compiler._loading is None


async def test_a_folder_without_a_tokenizer_is_told_every_time(tmp_path: Path) -> None:
    async with make_compiler(tmp_path) as compiler:
        for _ in range(2):
            with pytest.raises(ConfigError, match="no fast tokenizer"):
                await compiler.compile(ANY_OBJECT)


async def test_a_trial_that_is_given_up_does_not_answer_the_next_one() -> None:
    trial = TrialProcess(tiny()[0].tokens, timeout_s=20.0)
    assert await trial.refusal_of(library_source(regex("a"), 100)) is None
    slow = asyncio.create_task(trial.refusal_of(library_source(SLOW, 64 << 10)))
    await asyncio.sleep(0.05)

    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)

    assert "unclosed group" in str(await trial.refusal_of(library_source(BAD_REGEX, 100)))
    process = trial._process
    await trial.close()
    assert process is not None
    assert process.returncode is not None
