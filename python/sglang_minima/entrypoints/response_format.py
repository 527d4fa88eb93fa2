"""What `response_format` of the OpenAI routes asks for, as a grammar."""

from __future__ import annotations

from typing import Any

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


def _schema(value: Any) -> Grammar:
    if not isinstance(value, dict) or "schema" not in value:
        raise ValueError("json_schema must be an object with a schema")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError("json_schema.strict must be true or false")
    return Grammar.json_schema(value["schema"], strict=strict is not False)
