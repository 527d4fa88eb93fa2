"""What a request may ask for, and how JSON strings are put right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_minima.entrypoints.generate_input import convert_body
from sglang_minima.entrypoints.openai_types import CompletionBody
from sglang_minima.grammar.json_strings import json_contents, unsafe_pattern
from sglang_minima.grammar.spec import MAX_CHARACTERS, Grammar
from sglang_minima.sampling_params import InvalidRequest, SamplingParams

TAG = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}


def test_equal_schemas_are_one_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    spaced = json.dumps(schema, indent=4)
    assert Grammar.json_schema(schema) == Grammar.json_schema(spaced)
    assert Grammar.json_schema(schema) != Grammar.json_schema(schema, strict=False)
    assert hash(Grammar.json_schema(schema)) == hash(Grammar.json_schema(spaced))


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("json", {"type": "integer"}, Grammar.json_schema({"type": "integer"})),
        ("regex", "a+", Grammar("regex", "a+")),
        ("choice", ["a.b", "c"], Grammar("regex", r"a\.b|c")),
        ("grammar", 'root ::= "a"', Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_fields_of_vllm(kind: str, value: Any, expected: Grammar) -> None:
    given = {f"guided_{kind}": value}
    for fields in (given, {"structured_outputs": {kind: value, "regex_": None}}):
        body = convert_body({"prompt": "x", **fields}, CompletionBody)
        assert body.sampling(8, 100).grammar == expected


def test_the_older_structural_tag_becomes_the_newer() -> None:
    grammar = Grammar.structural_tag({"structures": [TAG], "triggers": ["<f"]})
    tag = json.loads(grammar.text)
    assert tag["format"]["type"] == "triggered_tags"
    assert tag["format"]["tags"][0]["content"]["json_schema"] == {"type": "object"}
    assert Grammar.structural_tag(tag) == grammar


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"regex": "a"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"json_schema": '{"type": "object"}', "regex": ""}, "json_schema"),
        ({"json_schema": True}, "json_schema"),
        ({"structural_tag": {"format": {}}, "regex": None}, "structural_tag"),
        ({"regex": "", "json_schema": None}, None),
    ],
)
def test_sampling_params_take_one_grammar(values: dict[str, Any], kind: str | None) -> None:
    grammar = SamplingParams.from_dict(values, 100).grammar
    assert (grammar and grammar.kind) == kind


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"regex": 5}, "regex must be a string"),
        ({"regex": "a", "json_schema": "{}"}, "at most one"),
        ({"json_schema": "{"}, "not valid JSON"),
        ({"json_schema": [1]}, "JSON schema"),
        ({"json_schema": False}, "JSON schema"),
        ({"json_schema": {}, "regex": "a"}, "at most one"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "characters"),
        ({"json_schema": {"a": "b" * MAX_CHARACTERS}}, "characters"),
        ({"structural_tag": []}, "object"),
        ({"structural_tag": {"structures": [{}], "triggers": []}}, "begin"),
        ({"grammar": None}, "unknown"),
    ],
)
def test_wrong_shapes(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        SamplingParams.from_dict(values, 100)


def test_deep_json_is_refused_and_not_a_crash() -> None:
    deep: Any = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest):
        SamplingParams.from_dict({"json_schema": deep}, 100)
    with pytest.raises(InvalidRequest):
        SamplingParams.from_dict({"json_schema": "[" * 100_000}, 100)


@pytest.mark.parametrize(
    ("pattern", "safe"),
    [
        ('^[^"]*$', True),
        (r'^[^"\\]{1,3}$', True),
        (r"^\d+\.\d\s\w$", True),
        ('a"b', False),
        (r"a\\b", False),
        (r"a\nb", False),
        (r"\x22", False),
        (r"\u0022", False),
        (r'["]', False),
        (r"[\n]", False),
        ("tab\there", False),
    ],
)
def test_patterns_that_could_break_out_of_a_string(pattern: str, safe: bool) -> None:
    schema = {"properties": {"x": {"type": "array", "items": {"pattern": pattern}}}}
    assert unsafe_pattern(schema) == (None if safe else pattern)
    assert unsafe_pattern({"const": {"pattern": pattern}}) is None
    tag = {"format": {"tags": [{"content": {"json_schema": schema}}]}}
    assert [part["json_schema"] for part in json_contents(tag)] == [schema]
