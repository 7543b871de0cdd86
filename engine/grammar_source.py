"""A request's grammar in the words of the grammar library; what could not be enforced exactly is refused."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from llguidance import LLMatcher

from messages.errors import InvalidRequest
from messages.requests import Grammar, GrammarKind

# Without forcing, a mask holds every token that may come, not only the tokenizer's favourite spelling of it.
_HEADER = '%llguidance {"no_forcing": true}\n'
# One space, or one line break and an indentation: a model that loves white space would never come to an end.
_WHITESPACE = r"[ ]|\r?\n([ ]{0,64}|\t{0,16})"
_JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
_REGEX_SYNTAX = frozenset(r"\.+*?()|[]{}^$#&-~/")
# Their values are data, in which the names of keywords mean nothing.
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
_FIELDS = {
    GrammarKind.JSON_SCHEMA: "response_format",
    GrammarKind.JSON_OBJECT: "response_format",
    GrammarKind.REGEX: "structured_outputs",
    GrammarKind.CHOICE: "structured_outputs",
}


def refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    """The error for a grammar that cannot be used.

    Args:
        grammar: The grammar.
        reason: Why; the end of a sentence that begins with the grammar's kind.
    """
    param = _FIELDS[grammar.kind]
    return InvalidRequest(f"{param}: the {grammar.kind.value} {reason}", param=param)


def library_source(grammar: Grammar, max_source_bytes: int) -> str:
    """Translate a grammar; it need not compile.

    Args:
        grammar: What the client wants.
        max_source_bytes: Longest source, in bytes of UTF-8.

    Raises:
        InvalidRequest: The source is too long or is not of its kind.
    """
    size_bytes = len(grammar.source.encode(errors="surrogatepass"))
    if size_bytes > max_source_bytes:
        raise refusal(grammar, f"has {size_bytes} bytes, more than the {max_source_bytes} that are allowed")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _of_schema(grammar, _parse(grammar))
        case GrammarKind.JSON_OBJECT:
            return _of_schema(grammar, {"type": "object"})
        case GrammarKind.REGEX:
            return _of_regex(grammar, grammar.source)
        case GrammarKind.CHOICE:
            return _of_regex(grammar, "|".join(_escaped(text) for text in _choices(grammar)))


def _parse(grammar: Grammar) -> Any:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(grammar.source, parse_constant=refuse_constant)
    except RecursionError as error:
        raise refusal(grammar, "is nested too deeply") from error
    except ValueError as error:
        raise refusal(grammar, f"is not valid JSON: {error}") from error


def _of_schema(grammar: Grammar, schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise refusal(grammar, "must be an object")
    for part in _objects(schema):
        _check_distinct_keys(grammar, part)
    return f"{_HEADER}start: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object inside a schema, itself among them, but not those that are data."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(part for name, part in value.items() if name not in _DATA_KEYWORDS)
        elif isinstance(value, list):
            pending.extend(value)


def _check_distinct_keys(grammar: Grammar, schema: dict[str, Any]) -> None:
    """A grammar cannot see that a free key comes twice, so it cannot count distinct ones above one."""
    wanted = schema.get("minProperties")
    required = schema.get("required")
    num_required = len(set(required)) if isinstance(required, list) and all(map(_is_text, required)) else 0
    if isinstance(wanted, int | float) and wanted > max(1, num_required):
        raise refusal(grammar, "uses minProperties above 1 and above the number of required properties")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _of_regex(grammar: Grammar, regex: str) -> str:
    try:
        regex.encode()
    except UnicodeEncodeError as error:
        raise refusal(grammar, "is not valid Unicode text (a lone surrogate)") from error
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        # The library would drop the last character without a word.
        raise refusal(grammar, "ends in the middle of an escape")
    parts = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return f"{_HEADER}{parts[0]['lark_grammar']}"


def _choices(grammar: Grammar) -> list[str]:
    texts = _parse(grammar)
    if not isinstance(texts, list) or not texts or not all(map(_is_text, texts)):
        raise refusal(grammar, "must be a list of one or more texts")
    return texts


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in _REGEX_SYNTAX else character for character in text)
