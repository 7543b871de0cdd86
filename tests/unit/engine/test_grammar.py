"""What is sampled through a grammar's masks always matches it, and nothing else can be sampled."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar_source import library_source
from engine.grammar_vocabulary import read_vocabulary
from engine.tokenizer import Tokenizer
from messages.errors import ConfigError, InvalidRequest, ServingError
from messages.requests import Grammar, GrammarKind
from tests.unit.engine.tiny_grammars import (
    END,
    START,
    WIDTH,
    allowed_ids,
    make_matcher,
    make_stripping_folder,
    mask_of,
    sample,
    text_of,
    tiny,
)

SEEDS = range(12)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "height": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.5},
        "kind": {"enum": ["a/b", 'quo"te', "日本", 3, None, True]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+-\\d{2}$"}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": ["string", "null"]}},
            "required": ["street"],
            "additionalProperties": False,
        },
        "one": {"const": {"x": [1, "é"]}},
    },
    "required": ["name", "age", "kind", "home", "one"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "tree": TREE,
    "any": True,
    "anything": {},
    "either": {"anyOf": [{"type": "integer", "multipleOf": 7}, {"type": "array", "minItems": 2, "maxItems": 3}]},
    "both": {"allOf": [{"type": "integer", "minimum": -5}, {"maximum": 12}]},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "patterns": {"type": "object", "patternProperties": {"^k": {"type": "integer"}}, "additionalProperties": False},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "string"}], "items": False, "minItems": 2},
    "unicode": {"type": "string", "minLength": 3, "maxLength": 6},
    "data": {"const": {"minProperties": 9, "NaN": "Infinity"}},
}
REGEXES = [
    r"test(ing)?",
    r"^[a-c]{2,5}$",
    r"(^a|b$)",
    r"\d{3}-\d{4}",
    r"[^ \n]{1,4}@[a-z]{1,3}\.(com|org)",
    r"(a|b)*a(a|b){6}",
    r"a/b\/c",
    r'a/ | "zzz"',
    "line\nbreak",
    r"\\/",
    r"(?i)yes|no",
    r"日?本+",
    r"",
    r"[☃\x41]{1,3}",
    r".{0,5}",
    r"(?s).{0,5}",
]
CHOICES = ["yes", "no", "", 'a"b', "a.b*(c)", "日本", "test", "testing", "x/y", "tab\t\n", "[z]^$&&~~--#<b>"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_is_json_that_its_schema_accepts(name: str, seed: int) -> None:
    matcher = make_matcher(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMAS[name]))

    token_ids = sample(matcher, seed)

    assert token_ids[-1] in tiny()[0].end_token_ids
    jsonschema.validate(json.loads(text_of(token_ids)), SCHEMAS[name])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_json_object_is_an_object_whatever_is_in_it(seed: int) -> None:
    token_ids = sample(make_matcher(GrammarKind.JSON_OBJECT), seed)

    assert isinstance(json.loads(text_of(token_ids)), dict)


@pytest.mark.parametrize("regex", REGEXES)
def test_every_output_matches_its_regex_as_a_whole(regex: str) -> None:
    matcher = make_matcher(GrammarKind.REGEX, regex)

    for seed in SEEDS:
        text = text_of(sample(matcher.fork(), seed))

        assert re.fullmatch(regex, text), text


def test_every_output_is_one_of_the_choices_and_every_choice_comes() -> None:
    matcher = make_matcher(GrammarKind.CHOICE, json.dumps(CHOICES))

    texts = {text_of(sample(matcher.fork(), seed)) for seed in range(400)}

    assert texts == set(CHOICES)


def test_a_mask_has_every_spelling_and_the_end_where_it_may_come() -> None:
    vocabulary, tokenizer = tiny()
    matcher = make_matcher(GrammarKind.REGEX, "test(ing)?")

    first = {vocabulary.tokens[token_id] for token_id in allowed_ids(matcher)}
    for token_id in tokenizer.encode("test"):
        matcher.accept(token_id)
    then = allowed_ids(matcher)

    assert first == {b"t", b"te", b"tes", b"test"}
    assert matcher.may_end
    assert {vocabulary.tokens[token_id] for token_id in then} == {b"", b"i", b"in", b"ing"}
    assert set(vocabulary.end_token_ids) < set(then)


def test_only_end_tokens_may_come_after_the_end() -> None:
    ends = list(tiny()[0].end_token_ids)
    matcher = make_matcher(GrammarKind.CHOICE, '["12"]')
    matcher.accept(tiny()[0].tokens.index(b"12"))

    before = allowed_ids(matcher)
    matcher.accept(ends[0])
    after = allowed_ids(matcher)
    matcher.accept(ends[0])

    assert before == after == ends
    assert matcher.is_finished
    with pytest.raises(ServingError, match="does not allow"):
        matcher.accept(0)


def test_control_tokens_and_ids_without_a_token_never_come() -> None:
    vocabulary, tokenizer = tiny()
    matcher = make_matcher(GrammarKind.REGEX, "(?s).*")

    allowed = set(allowed_ids(matcher))
    (control,) = tokenizer.encode(START)
    (spelled_out,) = tokenizer.encode("<think>")

    assert control not in allowed
    assert spelled_out in allowed
    assert max(allowed) < vocabulary.num_tokens < WIDTH
    assert set(tokenizer.encode(END)) <= allowed


@pytest.mark.parametrize("token_id", [-1, 0, WIDTH - 1, WIDTH + 5, 10**12])
def test_a_token_that_is_not_allowed_is_an_error(token_id: int) -> None:
    matcher = make_matcher(GrammarKind.CHOICE, '["test"]')

    with pytest.raises(ServingError, match="does not allow"):
        matcher.accept(token_id)


def test_an_end_token_before_the_end_is_an_error() -> None:
    matcher = make_matcher(GrammarKind.CHOICE, '["test"]')

    with pytest.raises(ServingError, match="does not allow"):
        matcher.accept(tiny()[0].end_token_ids[0])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 60), other=st.integers(0, 10**6))
def test_a_fork_goes_its_own_way_and_a_replay_comes_to_the_same_place(seed: int, cut: int, other: int) -> None:
    fresh = make_matcher(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    token_ids = sample(fresh.fork(), seed)[:cut]
    matcher = fresh.fork()
    for token_id in token_ids:
        matcher.accept(token_id)
    before = mask_of(matcher)

    fork = matcher.fork()
    rest = sample(fork, other)
    replayed = fresh.fork()
    for token_id in token_ids:
        replayed.accept(token_id)

    assert mask_of(matcher) == before == mask_of(replayed)
    assert matcher.is_finished == replayed.is_finished
    jsonschema.validate(json.loads(text_of([*token_ids, *rest])), PERSON)


def test_a_matcher_made_in_one_thread_works_in_another() -> None:
    matcher = make_matcher(GrammarKind.JSON_SCHEMA, json.dumps(TREE))

    with ThreadPoolExecutor(1) as threads:
        token_ids = threads.submit(sample, matcher.fork(), 5).result()

    assert token_ids == sample(matcher, 5)


def test_an_output_too_complex_to_follow_ends_its_own_request_only() -> None:
    many = {"properties": {f"p{index}": {} for index in range(1500)}}
    matcher = make_matcher(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "object", **many}}))
    matcher.accept(tiny()[0].tokens.index(b"["))

    with pytest.raises(InvalidRequest, match="too complex to follow"):
        matcher.accept(tiny()[0].tokens.index(b"{"))
    allowed = allowed_ids(matcher)

    assert allowed == list(tiny()[0].end_token_ids)
    with pytest.raises(InvalidRequest, match="too complex to follow"):
        matcher.accept(allowed[0])


def test_white_space_between_parts_is_bounded() -> None:
    matcher = make_matcher(GrammarKind.JSON_OBJECT)
    letters = tiny()[0].tokens
    matcher.accept(letters.index(b"{"))
    matcher.accept(letters.index(b"\n"))
    for _ in range(64):
        matcher.accept(letters.index(b" "))

    texts = {letters[token_id] for token_id in allowed_ids(matcher)}

    assert b"}" in texts
    assert not {b" ", b"\n", b"\t"} & texts


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be an object"),
        ('{"maximum": NaN}', "no JSON number"),
        ("[" * 50_000, "nested too deeply"),
        ('{"minProperties": 2}', "minProperties"),
        ('{"type": "object", "required": ["a"], "minProperties": 3}', "minProperties"),
        ('{"items": [{"minProperties": 2.0}]}', "minProperties"),
        ('{"const": "' + "x" * (64 << 10) + '"}', "bytes, more than"),
    ],
)
def test_a_schema_that_is_none_is_refused_with_the_reason(schema: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        library_source(Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema), 64 << 10)

    assert raised.value.context["param"] == "response_format"


@pytest.mark.parametrize("source", ["", "{}", "[]", "[1]", '["a", null]', '"abc"'])
def test_choices_must_be_texts(source: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        library_source(Grammar(kind=GrammarKind.CHOICE, source=source), 64 << 10)

    assert raised.value.context["param"] == "structured_outputs"


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', "Unsatisfiable"),
        (GrammarKind.JSON_SCHEMA, "false", "Unsatisfiable"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "nothing matches"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', "Invalid type"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.com/x"}', "not present"),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(1500)}}),
            "alternatives",
        ),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-ahead"),
        (GrammarKind.REGEX, r"(a)\1", "backreferences"),
        (GrammarKind.REGEX, r"[^\s\S]", "nothing matches"),
        (GrammarKind.REGEX, r"(?-u:\xff)", "UTF-8"),
        (GrammarKind.REGEX, "a\\", "middle of an escape"),
        (GrammarKind.REGEX, "a\\\\\\", "middle of an escape"),
        (GrammarKind.REGEX, "\ud800", "surrogate"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused(kind: GrammarKind, source: str, message: str) -> None:
    with pytest.raises((ValueError, InvalidRequest), match=message) as raised:
        make_matcher(kind, source)

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("regex", "texts"), [("abc|bca", {"abc", "bca"}), (" abc", {" abc"}), ("  ?abc", {" abc", "  abc"})]
)
def test_a_space_that_the_decoder_strips_does_not_count(tmp_path: Path, regex: str, texts: set[str]) -> None:
    tokenizer = Tokenizer.load(make_stripping_folder(tmp_path))
    vocabulary = read_vocabulary(tmp_path, tokenizer.vocab_size, tokenizer.eos_ids)
    matcher = make_matcher(GrammarKind.REGEX, regex, vocabulary)

    found = set()
    pending = [(matcher, ())]
    while pending:
        matcher, token_ids = pending.pop()
        for token_id in allowed_ids(matcher, tokenizer.vocab_size):
            fork = matcher.fork()
            fork.accept(token_id)
            if fork.is_finished:
                found.add(tokenizer.decode(token_ids))
            else:
                pending.append((fork, (*token_ids, token_id)))

    assert found == texts


def test_a_model_without_an_end_token_has_no_structured_output(tmp_path: Path) -> None:
    make_stripping_folder(tmp_path)

    with pytest.raises(ConfigError, match="end token"):
        read_vocabulary(tmp_path, 300, frozenset({5000}))
    with pytest.raises(ConfigError, match="no fast tokenizer"):
        read_vocabulary(tmp_path / "missing", 300, frozenset({1}))
