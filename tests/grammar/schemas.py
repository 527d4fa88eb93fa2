"""Random JSON schemas of everything that the server promises to follow."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
PATTERNS = ("^[a-z]{2,6}$", "^[^x]{1,4}$", r"^\d{3}-\d{2}$", "^(red|green|blue)$", r"^\w+\s\w+$")
KEYS = ("name", "count", "ok", "list", "inner", "kind", "x", "a b", 'quo"te', "ünï", "back\\slash")
VALUES = ("plain", 'with "quotes"', "line\nbreak", "", 0, -3, 2.5, True, False, None, [1], {"a": 1})


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose texts stay short, so that a random model comes to an end."""
    kinds = [_string, _string, _integer, _number, _constant, _boolean]
    if depth:
        kinds += [_object, _object, _array, _any_of, _nullable]
    return rng.choice(kinds)(rng, depth)


def object_schema(rng: random.Random) -> dict[str, Any]:
    """Like `random_schema`, with an object at the top and shared definitions."""
    schema = _object(rng, 2)
    schema["$defs"] = {"leaf": random_schema(rng, 1)}
    if rng.random() < 0.5:
        schema["properties"]["ref"] = {"$ref": "#/$defs/leaf"}
        schema["required"] = [*schema["required"], "ref"]
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    form = rng.randrange(4)
    if form == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if form == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(8)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    bounds = ({}, {"minimum": low}, {"minimum": low, "maximum": low + rng.randrange(500)})
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number"}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null"))}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"const": rng.choice(VALUES)}
    return {"enum": rng.sample(VALUES, rng.randrange(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(KEYS, rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    items = {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low}
    return items | {"maxItems": low + rng.randrange(3)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


def _nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice((["string", "null"], ["integer", "null"])), "maxLength": 4}
