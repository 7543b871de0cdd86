"""What a client asks its output to look like, as a grammar; whether the grammar compiles is seen by a worker."""

import json

from deployments.gateway.validation import boolean, refuse_unknown, text, texts
from messages.errors import InvalidRequest
from messages.requests import Grammar, GrammarKind

MAX_SOURCE_BYTES = 64 * 1024
"""The same as a worker's grammar compiler allows; here the refusal names the client's own field."""
MAX_CHOICE_TEXTS = 1024
_KINDS = ("json", "regex", "choice")


def json_schema(value: object, name: str) -> Grammar:
    """A JSON schema, given as an object or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(text(value, name))
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} is not valid JSON", param=name) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON schema, which is an object", param=name)
    try:
        source = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} has a number that is not JSON, or is nested too deeply", param=name) from error
    return _grammar(GrammarKind.JSON_SCHEMA, source, name)


def json_object() -> Grammar:
    """Any JSON object."""
    return Grammar(kind=GrammarKind.JSON_OBJECT)


def regex(value: object, name: str) -> Grammar:
    """A regular expression that the whole output matches."""
    if not value:
        raise InvalidRequest(f"{name} must be a regular expression that is not empty", param=name)
    return _grammar(GrammarKind.REGEX, text(value, name), name)


def choice(value: object, name: str) -> Grammar:
    """One of 1..1024 texts."""
    options = texts(value, name, low=1, high=MAX_CHOICE_TEXTS, max_characters=MAX_SOURCE_BYTES)
    return _grammar(GrammarKind.CHOICE, json.dumps(options, ensure_ascii=False), name)


def parse_response_format(value: object) -> Grammar | None:
    """OpenAI's response_format; None for plain text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("response_format must be an object", param="response_format")
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        message = "response_format.type must be one of text, json_object, json_schema"
        raise InvalidRequest(message, param="response_format.type")
    refuse_unknown(value, ("type", "json_schema") if kind == "json_schema" else ("type",), inside="response_format")
    if kind == "json_schema":
        return _named_schema(value.get("json_schema"))
    return json_object() if kind == "json_object" else None


def _named_schema(value: object) -> Grammar:
    name = "response_format.json_schema"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object with a schema", param=name)
    # `name` is a label and `strict` is always so; a `description` would have to reach the model.
    refuse_unknown(value, ("name", "schema", "strict"), inside=name)
    text(value.get("name", ""), f"{name}.name")
    if value.get("strict") is not None:
        boolean(value["strict"], f"{name}.strict")
    schema = value.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{name}.schema must be a JSON schema, which is an object", param=f"{name}.schema")
    return json_schema(schema, f"{name}.schema")


def parse_structured_outputs(value: object) -> Grammar | None:
    """The extension field: {"json": schema}, {"regex": ...} or {"choice": [...]}."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("structured_outputs must be an object", param="structured_outputs")
    refuse_unknown(value, _KINDS, inside="structured_outputs")
    given = {kind: wanted for kind, wanted in value.items() if wanted is not None}
    if len(given) != 1:
        message = f"structured_outputs must have exactly one of {', '.join(_KINDS)}"
        raise InvalidRequest(message, param="structured_outputs")
    ((kind, wanted),) = given.items()
    makers = {"json": json_schema, "regex": regex, "choice": choice}
    return makers[kind](wanted, f"structured_outputs.{kind}")


def _grammar(kind: GrammarKind, source: str, name: str) -> Grammar:
    if len(text(source, name).encode()) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{name} is larger than {MAX_SOURCE_BYTES} bytes", param=name)
    return Grammar(kind=kind, source=source)
