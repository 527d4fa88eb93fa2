"""Random constraints on an output: sound, broken, and of the kinds that cost compilers dearly."""

from __future__ import annotations

import json
import random
from typing import Any

_ATOMS = (
    "a",
    "b",
    "[a-c]",
    ".",
    r"\d",
    r"\w",
    "[^a]",
    "é",
    "(",
    ")",
    "|",
    "\\",
    "$",
    "^",
    "(?:ab)",
)
_COUNTS = ("*", "+", "?", "{2}", "{0,3}", "{3,}", "{,2}", "{1,90}", "{5,2}", "{", "{1000}")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object", "text", 5, None)
_ODD: tuple[Any, ...] = (None, True, 0, -1, 1 << 70, "", "x", [], {}, [{}], "\x00", "\ud83d\ude00")


def random_grammar(rng: random.Random) -> tuple[str, Any]:
    """The name of a constraint and a value for it."""
    make = rng.choice((_regex, _ebnf, _schema, _tag))
    value = make(rng)
    if rng.random() < 0.08:
        value = rng.choice(_ODD)
    elif isinstance(value, str) and rng.random() < 0.1:
        place = rng.randrange(len(value) + 1)
        value = (
            value[:place] + rng.choice(("(", '"', "{", "]", "::=", "\\", "")) + value[place + 1 :]
        )
    names = {_regex: "regex", _ebnf: "ebnf", _schema: "json_schema", _tag: "structural_tag"}
    return names[make], value


def _regex(rng: random.Random, depth: int = 3) -> str:
    parts = []
    for _ in range(rng.randrange(1, 5)):
        if depth and rng.random() < 0.35:
            part = f"({_regex(rng, depth - 1)}{rng.choice(('', '|' + _regex(rng, depth - 1)))})"
        else:
            part = rng.choice(_ATOMS if rng.random() < 0.2 else _ATOMS[:8])
        parts.append(part + (rng.choice(_COUNTS) if rng.random() < 0.4 else ""))
    return "".join(parts)


def _ebnf(rng: random.Random) -> str:
    names = ["root", *(f"r{n}" for n in range(rng.randrange(5)))]

    def term() -> str:
        kind = rng.random()
        if kind < 0.45:
            return rng.choice(('"a"', '"bc"', "[a-z]", "[^x]", '""', '"é"', '"\\n"'))
        if kind < 0.8:
            return rng.choice(names if rng.random() < 0.97 else ("nowhere",))
        return f"({alternatives(2)})" + rng.choice(("", "*", "+", "?", "{2,5}", "{3}"))

    def alternatives(most: int) -> str:
        choices = (
            " ".join(term() for _ in range(rng.randrange(1, 4)))
            for _ in range(rng.randrange(1, most + 1))
        )
        return " | ".join(choices)

    return "\n".join(f"{name} ::= {alternatives(3)}" for name in names)


def _schema(rng: random.Random, depth: int = 3) -> Any:
    if rng.random() < 0.03:
        return rng.choice(_ODD)
    schema: dict[str, Any] = {"type": rng.choice(_TYPES[: 7 if rng.random() < 0.95 else 10])}
    if depth and rng.random() < 0.3:
        schema = {rng.choice(("anyOf", "oneOf", "allOf")): _several(rng, depth)}
    match schema.get("type"):
        case "object":
            names = rng.sample(("a", "b", 'q"', "long name", "é", ""), rng.randrange(4))
            schema["properties"] = {name: _schema(rng, max(depth - 1, 0)) for name in names}
            schema["required"] = [name for name in names if rng.random() < 0.6]
            schema["additionalProperties"] = rng.choice((True, False, {"type": "integer"}))
        case "array":
            if depth:
                schema["items"] = _schema(rng, depth - 1)
            schema |= rng.choice(({}, {"minItems": 2}, {"maxItems": 3}, {"minItems": 4000}))
        case "string":
            pattern = _regex(rng, 1)
            bounds = ({"maxLength": 4}, {"minLength": 3}, {"pattern": pattern}, {"format": "date"})
            schema |= rng.choice(({}, *bounds))
        case "integer" | "number":
            schema |= rng.choice(({}, {"minimum": -3}, {"maximum": 999, "minimum": 17}))
    if rng.random() < 0.05:
        schema["$ref"] = rng.choice(("#", "#/nowhere", "#/properties/a"))
    if rng.random() < 0.1:
        schema["enum"] = rng.choice((["a", 1], [], [None], [{"a": [1]}]))
    return schema if rng.random() < 0.7 or depth < 3 else json.dumps(schema)


def _several(rng: random.Random, depth: int) -> list[Any]:
    return [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]


def _format(rng: random.Random, depth: int) -> Any:
    kinds = ("const_string", "json_schema", "any_text", "regex", "grammar", "nothing")
    if depth and rng.random() < 0.6:
        kinds = ("sequence", "or", "tag", "triggered_tags", "tags_with_separator", "star", "repeat")
    kind = rng.choice(kinds)
    value: dict[str, Any] = {"type": kind}
    match kind:
        case "const_string":
            value["value"] = rng.choice(("ok", "", "é"))
        case "json_schema":
            value["json_schema"] = _schema(rng, 1)
        case "regex":
            value["pattern"] = _regex(rng, 1)
        case "grammar":
            value["grammar"] = _ebnf(rng)
        case "sequence" | "or":
            value["elements"] = [_format(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
        case "tag":
            value |= _one_tag(rng, depth)
        case "triggered_tags":
            value["tags"] = [_one_tag(rng, depth) for _ in range(rng.randrange(1, 3))]
            value["triggers"] = rng.choice((["<"], ["<f"], ["<f", "<g"], []))
            value["stop_after_first"] = rng.random() < 0.5
        case "tags_with_separator":
            value["tags"] = [_one_tag(rng, depth)]
            value["separator"] = rng.choice((",", ""))
        case "star":
            value["content"] = _format(rng, depth - 1)
        case "repeat":
            value |= {"content": _format(rng, depth - 1), "min": 1, "max": rng.choice((3, -1, 0))}
    return value


def _one_tag(rng: random.Random, depth: int) -> dict[str, Any]:
    begin = rng.choice(("<f>", "<g>", "f", ""))
    return {"type": "tag", "begin": begin, "content": _format(rng, depth - 1), "end": "</f>"}


def _tag(rng: random.Random) -> Any:
    tag = {"type": "structural_tag", "format": _format(rng, 2)}
    return tag if rng.random() < 0.7 else json.dumps(tag)
