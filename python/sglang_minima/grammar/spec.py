"""`Grammar`: the constraint that a request puts on its output, as text."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_CHARACTERS = 1 << 18
"""Length of the longest grammar that is looked at."""

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")
"""Their names in the sampling parameters of a request, which may have one of them."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on the generated text; equal ones are compiled once.

    The constructors check the shape only. Whether the grammar means anything is found out by
    `GrammarChecker`.
    """

    kind: Kind
    text: str
    """JSON for "json_schema" and "structural_tag"."""
    strict: bool = True
    """JSON schema: nothing that the schema does not name is allowed."""

    @classmethod
    def make(cls, kind: Kind, value: Any) -> Grammar:
        """A grammar of any kind from the value of a request.

        Raises:
            ValueError: with one sentence for the client.
        """
        if kind == "json_schema":
            return cls.json_schema(value)
        if kind == "structural_tag":
            return cls.structural_tag(value)
        if not isinstance(value, str):
            raise ValueError(f"{kind} must be a string")
        return cls(kind, _bounded(kind, value))

    @classmethod
    def json_schema(cls, schema: Any, strict: bool = True) -> Grammar:
        """JSON that follows a schema.

        Args:
            schema: an object, true, or the JSON text of one.
            strict: allow only properties and items that the schema names.

        Raises:
            ValueError: not such a value.
        """
        value = _parsed("json_schema", schema)
        if not isinstance(value, dict) and value is not True:
            raise ValueError("json_schema must be a JSON schema: an object")
        return cls("json_schema", _dumped("json_schema", value), strict)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}', strict=False)

    @classmethod
    def structural_tag(cls, tag: Any) -> Grammar:
        """Free text in which certain beginnings start a constrained part, such as a tool call.

        Args:
            tag: {"type": "structural_tag", "format": {...}}, the older form with "structures"
                and "triggers", or the JSON text of one.

        Raises:
            ValueError: not such a value.
        """
        value = _parsed("structural_tag", tag)
        if not isinstance(value, dict):
            raise ValueError("structural_tag must be an object")
        if "format" not in value:
            value = {"type": "structural_tag", "format": _triggered(value)}
        return cls("structural_tag", _dumped("structural_tag", value))


def _triggered(value: dict[str, Any]) -> dict[str, Any]:
    """The older form as the format that replaced it."""
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("structural_tag needs a format, or structures and triggers")
    tags = []
    for item in structures:
        if not isinstance(item, dict) or not {"begin", "end"} <= item.keys():
            raise ValueError("structural_tag.structures must be objects with begin, schema and end")
        content = {"type": "json_schema", "json_schema": item.get("schema") or True}
        tags.append({"begin": item["begin"], "content": content, "end": item["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    _bounded(name, value)
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None


def _dumped(name: str, value: Any) -> str:
    try:
        return _bounded(name, msgspec.json.encode(value).decode())
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None


def _bounded(name: str, text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{name} has more than {MAX_CHARACTERS} characters")
    return text
