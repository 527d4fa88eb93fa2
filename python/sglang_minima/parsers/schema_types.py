"""JSON values from plain text, by what a schema says of their types."""

from __future__ import annotations

import json
from typing import Any

Schema = dict[str, Any] | bool


def is_text(schema: Any) -> bool:
    """Whether a schema allows nothing but strings, so that a value is its text as it stands."""
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        return bool(schema["type"] == "string")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    branches = schema.get("anyOf") or schema.get("oneOf")
    return isinstance(branches, list) and all(map(is_text, branches))


def json_text(text: str, schema: Any) -> str:
    """The JSON text of a value that was written without JSON's quotes.

    What is JSON and of a type that the schema allows stays as it is; Python's True, False and None
    are taken for JSON's words; all else is a string.
    """
    body = text.strip()
    types = _types(schema)
    body = {"True": "true", "False": "false", "None": "null"}.get(body, body)
    try:
        value = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not _fits(value, types):
        return json.dumps(text, ensure_ascii=False)
    return body


def _fits(value: Any, types: set[str]) -> bool:
    if isinstance(value, str) and "string" in types:
        # A string would stand there without quotes: these are part of it.
        return False
    if type(value) is int and "number" in types:
        return True
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return _type(value) in types


def _types(schema: Any) -> set[str]:
    """Types that a schema allows; empty: any."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    branches = [_types(branch) for branch in schema.get("anyOf") or schema.get("oneOf") or []]
    return set().union(*branches) if all(branches) else set()


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
