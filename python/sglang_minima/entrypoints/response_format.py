"""What `response_format` of the OpenAI routes asks for, as a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_minima.entrypoints.unsupported import is_set
from sglang_minima.grammar.spec import Grammar
from sglang_minima.sampling_params import InvalidRequest


def format_grammar(response_format: dict[str, Any] | None) -> Grammar | None:
    """The grammar of a response format; None for plain text.

    A JSON schema is strict (nothing that it does not name is allowed) unless it says
    `"strict": false`.

    Raises:
        InvalidRequest: unknown type, or the value that the type needs is missing or wrong.
    """
    if not response_format:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    try:
        if kind == "json_object":
            return Grammar.json_object()
        if kind == "structural_tag":
            return Grammar.structural_tag(response_format)
        if kind == "json_schema":
            return _schema(response_format.get("json_schema"))
    except ValueError as error:
        raise InvalidRequest(f"response_format: {error}") from None
    raise InvalidRequest(
        "response_format.type must be text, json_object, json_schema or structural_tag"
    )


def guided_grammar(guided: Mapping[str, Any], structured: Any) -> Grammar | None:
    """The grammar that vLLM's fields ask for; None when none of them is set.

    Args:
        guided: values of `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`
            without that prefix.
        structured: value of `structured_outputs`: an object of the same names.

    Raises:
        InvalidRequest: more than one is set, or one that is none of them, or its value is wrong.
    """
    given = [(f"guided_{kind}", kind, value) for kind, value in guided.items()]
    if structured is not None:
        if not isinstance(structured, dict):
            raise InvalidRequest("structured_outputs must be an object")
        given += [(f"structured_outputs.{kind}", kind, v) for kind, v in structured.items()]
    given = [entry for entry in given if is_set(entry[2])]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"the output cannot follow both {given[0][0]} and {given[1][0]}")
    name, kind, value = given[0]
    try:
        match kind:
            case "json":
                return Grammar.json_schema(value)
            case "json_object":
                return Grammar.json_object()
            case "regex":
                return Grammar.make("regex", value)
            case "grammar":
                return Grammar.make("ebnf", value)
            case "structural_tag":
                return Grammar.structural_tag(value)
            case "choice" if isinstance(value, list) and all(isinstance(v, str) for v in value):
                return Grammar.make("regex", "|".join(map(re.escape, value)))
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}") from None
    if kind == "choice":
        raise InvalidRequest(f"{name} must be a list of texts")
    raise InvalidRequest(f"{name} is not supported, see response_format, regex and ebnf")


def _schema(value: Any) -> Grammar:
    if not isinstance(value, dict) or "schema" not in value:
        raise ValueError("json_schema must be an object with a schema")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError("json_schema.strict must be true or false")
    return Grammar.json_schema(value["schema"], strict=strict is not False)
