"""What xgrammar (0.2.9) gets wrong about JSON schemas, put right.

A string with a length bound may hold raw control characters there, which JSON forbids, and no
escapes, which JSON needs (its issue 800). A `pattern` that spells a quote, a backslash or a
control character puts that into the text as it is. A `$ref` to another document is any JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_BOUNDED = re.compile(r'^(\w+_characters) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
"""The rule of one character of such a string, in a printed grammar."""
_CHARACTER = r'(([^\"\\\0-\x1f]) | ("\\" [\"\\/bfnrt]))'

_CLASS = re.compile(r"\[\^?(?:\\.|[^\]\\]){2,}\]|\[\^(?:\\.|[^\]\\])\]", re.DOTALL)
"""Character classes that are more than one character: of these, xgrammar leaves out what a string
may not hold."""
_UNSAFE = re.compile(r'"|\\[\\nrtfvbxuc0]|[\x00-\x1f]')
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keys whose values are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys whose values are schemas by name."""


def with_sound_strings(ebnf: str) -> str | None:
    """The printed grammar with bounded strings put right; None when it has none."""
    fixed, count = _BOUNDED.subn(lambda match: f"{match[1]} ::= {_CHARACTER}", ebnf)
    return fixed if count else None


def unsafe_pattern(schema: Any) -> str | None:
    """A `pattern` in a schema whose strings could break out of their quotes; None if there is
    none."""
    for pattern in _strings(schema, "pattern"):
        if _UNSAFE.search(_CLASS.sub("", pattern)):
            return pattern
    return None


def json_contents(value: Any) -> Iterator[dict[str, Any]]:
    """The parts of a structural tag that ask for JSON: each holds a `json_schema`."""
    if isinstance(value, dict):
        if "json_schema" in value:
            yield value
        for key, item in value.items():
            if key != "json_schema":
                yield from json_contents(item)
    elif isinstance(value, list):
        for item in value:
            yield from json_contents(item)


def foreign_reference(schema: Any) -> str | None:
    """A `$ref` that does not point into the schema itself, which xgrammar takes for any JSON;
    None if there is none."""
    for reference in _strings(schema, "$ref"):
        if reference != "#" and not reference.startswith("#/"):
            return reference
    return None


def _strings(schema: Any, name: str, named: bool = False) -> Iterator[str]:
    """The strings that keywords of this name have in a schema.

    Args:
        named: the keys are names of properties and definitions, not keywords.
    """
    if isinstance(schema, dict):
        for key, item in schema.items():
            if named:
                yield from _strings(item, name)
            elif key == name and isinstance(item, str):
                yield item
            elif key not in _DATA:
                yield from _strings(item, name, key in _NAMED)
    elif isinstance(schema, list):
        for item in schema:
            yield from _strings(item, name)
