"""Parsers of generated text: the same result however it is cut, and nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_minima.parsers.answer import AnswerFormat
from sglang_minima.parsers.formats import TOOL_FORMATS
from sglang_minima.parsers.output import OutputParser
from sglang_minima.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    ParsedText,
    Parser,
    Piece,
    Reasoning,
    ToolCall,
    parse_whole,
)
from sglang_minima.parsers.reasoning import ReasoningParser
from sglang_minima.parsers.tool_calls import Llama3Parser, TaggedParser, ToolParser

NAMES = ("weather", "f", 'a"b', "get time")


def llama3() -> Llama3Parser:
    return Llama3Parser(NAMES)


def chained() -> OutputParser:
    return OutputParser(ReasoningParser(opened=False), TaggedParser())


def chained_opened() -> OutputParser:
    return OutputParser(ReasoningParser(opened=True), Llama3Parser(NAMES))


SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"α": {"type": "string"}, "n": {"type": "integer"}}}
}


def coder() -> ToolParser:
    return TOOL_FORMATS["qwen3_coder"].parser(SCHEMAS)


PARSERS: list[Callable[[], Parser]] = [
    TaggedParser,
    llama3,
    coder,
    lambda: ReasoningParser(opened=False),
    lambda: ReasoningParser(opened=True),
    chained,
    chained_opened,
]

# What models write, whole and broken; Greek letters stand for what must not be lost.
WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "\n", " ", "; "),
        *('{"name": "weather", "arguments": ', '{"name": "f", "parameters": ', "{", "}", "[", "]"),
        *('{"arguments": {"α": "β"}, "name": "f"}', '{"city": "γ\\"δ\\\\"}', '{"a": [1, {}]}', '"'),
        *("α", "β ", "γδ", ",", ":", "\\", '"name"', '"arguments"', "<tool", "call>", "</thi", "1"),
        *("<function=f>", "</function>", "<parameter=α>", "<parameter=n>", "</parameter>", "</par"),
        *("<function=", "<parameter=", "δ>", "\nβ\n</parameter>\n", "7", "true", '"γ"', "{}"),
        *('"id": "x", ', '"{\\"a\\": \\"ε\\"}"', '{"name": "f"}', '{"name": "unknown"}', "é", "{}"),
    ]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    edges = [0, *places, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def parse_chunks(parser: Parser, chunks: list[str]) -> tuple[ParsedText, list[Piece]]:
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    pieces += parser.finish()
    parsed = ParsedText()
    parsed.add(pieces)
    return parsed, pieces


def text_of(piece: Piece) -> str:
    return piece.name if isinstance(piece, CallStart) else piece.text


@pytest.mark.parametrize("make", PARSERS, ids=range(len(PARSERS)))
@given(data=st.data(), text=TEXTS)
def test_chunks_do_not_matter(make: Callable[[], Parser], data: st.DataObject, text: str) -> None:
    whole = parse_whole(make(), text)
    in_pieces, _ = parse_chunks(make(), cut(data, text))
    by_character, pieces = parse_chunks(make(), list(text))
    assert in_pieces == whole
    assert by_character == whole
    assert all(
        not isinstance(piece, Content | Reasoning | CallArguments) or piece.text for piece in pieces
    )


@pytest.mark.parametrize("make", PARSERS, ids=range(len(PARSERS)))
@given(text=TEXTS)
def test_no_letter_is_lost(make: Callable[[], Parser], text: str) -> None:
    """Only markup may go; a call whose arguments come before its name is given out behind it."""
    _, pieces = parse_chunks(make(), [text])
    given_out = "".join(text_of(piece) for piece in pieces)
    payload = "αβγδε"
    assert [c for c in given_out if c in payload] == [c for c in text if c in payload]


@pytest.mark.parametrize("make", PARSERS, ids=range(len(PARSERS)))
@given(text=st.text(st.characters(exclude_characters="<{", codec="utf-8")))
def test_text_without_markup_is_untouched(make: Callable[[], Parser], text: str) -> None:
    parsed = parse_whole(make(), text)
    assert not parsed.calls
    if parsed.content == "":
        assert parsed.reasoning == text.lstrip(" \t\r\n")
    else:
        assert parsed == ParsedText(content=text)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), JSON, max_size=3)), max_size=4
)
PLAIN = st.text(st.characters(exclude_characters="<{", codec="utf-8")).map(str.strip)


def hermes_text(content: str, calls: list[tuple[str, Any]], indent: int | None) -> str:
    blocks = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, indent=indent)}"
        "\n</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([*([content] if content else []), *blocks])


@given(content=PLAIN, calls=CALLS, indent=st.sampled_from([None, 2]), data=st.data())
def test_hermes_reads_what_the_format_writes(
    content: str, calls: list[tuple[str, Any]], indent: int | None, data: st.DataObject
) -> None:
    text = hermes_text(content, calls, indent)
    parsed, _ = parse_chunks(TaggedParser(), cut(data, text))
    assert parsed.content.rstrip() == content.rstrip()
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


@given(calls=CALLS.filter(bool), data=st.data(), tag=st.booleans(), joint=st.sampled_from("; \n"))
def test_llama3_reads_what_the_format_writes(
    calls: list[tuple[str, Any]], data: st.DataObject, tag: bool, joint: str
) -> None:
    objects = [json.dumps({"name": name, "parameters": given}) for name, given in calls]
    text = ("<|python_tag|>" if tag else "") + joint.join(objects)
    parsed, _ = parse_chunks(llama3(), cut(data, text))
    assert parsed.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls


def xml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


TYPED: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(st.characters(codec="utf-8")).filter(lambda text: "</parameter>" not in text),
    "integer": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(JSON, max_size=3),
    "object": st.dictionaries(st.text(), JSON, max_size=3),
}
KEY = st.text(st.characters(exclude_characters=">\n\r\t ", codec="utf-8"), min_size=1, max_size=9)


@given(data=st.data(), keys=st.dictionaries(KEY, st.sampled_from(sorted(TYPED)), max_size=4))
def test_coder_reads_what_the_format_writes(data: st.DataObject, keys: dict[str, str]) -> None:
    arguments = {key: data.draw(TYPED[kind]) for key, kind in keys.items()}
    schema = {"type": "object", "properties": {key: {"type": keys[key]} for key in keys}}
    form = TOOL_FORMATS["qwen3_coder"]
    call = form.call_text("get time", arguments)
    text = f"So.\n{call}\n{call}"
    parser = form.parser({"get time": schema})
    parsed, _ = parse_chunks(parser, cut(data, text))
    assert parsed.content == "So."
    assert [call.name for call in parsed.calls] == ["get time"] * 2
    assert [json.loads(call.arguments) for call in parsed.calls] == [arguments] * 2
    assert parser.ended_calls == 2


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, ' "q" ', ' "q" '),
        ({"enum": ["a", "b"]}, "a", "a"),
        ({"const": "1"}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"const": "x"}]}, "null", "null"),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, '"x"', '"x"'),
        ({"type": ["string", "null"]}, "x", "x"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {}]}, "[1]", [1]),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, "{'a'", "{'a'"),
        ({}, "a b", "a b"),
        (True, "2", 2),
        (5, "2", 2),
    ],
)
def test_plain_values_by_their_schema(schema: Any, text: str, value: Any) -> None:
    call = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    form = TOOL_FORMATS["qwen3_coder"]
    parsed = parse_whole(form.parser({"f": {"properties": {"x": schema}}}), call)
    got = json.loads(parsed.calls[0].arguments)
    assert got == {"x": value} and type(got["x"]) is type(value)


def test_strings_of_coder_stream() -> None:
    parser = coder()
    text = "<tool_call>\n<function=f>\n<parameter=α>\none two\n</parameter>\n</function>"
    seen = [parser.push(char) for char in text]
    assert [step for step, char in zip(seen, text, strict=True) if char == "w"] == [
        [CallArguments(0, "w")]
    ]
    pieces = [piece for step in seen for piece in step]
    assert pieces[0] == CallStart(0, "f")
    assert "".join(text_of(piece) for piece in pieces[1:]) == '{"α": "one two"}'


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3"])
def test_the_end_of_a_call_is_told_at_once(name: str) -> None:
    """The answer is full with the character that ends the last call it may have."""
    form = TOOL_FORMATS[name]
    call = form.call_text("f", {"α": "}</function>{"})
    text = f"{call}{form.separator}{call}"
    parser = AnswerFormat(name, ("f",), max_calls=1).parser()
    lengths = []
    for length, char in enumerate(text, 1):
        parser.push(char)
        if parser.full:
            lengths.append(length)
    end = {"hermes": "}", "llama3": "}", "qwen3_coder": "</function>"}[name]
    assert lengths == list(range(call.rindex(end) + len(end), len(text) + 1))
    parsed = parse_whole(AnswerFormat(name, ("f",), max_calls=1).parser(), text[: lengths[0]])
    assert [call.name for call in parsed.calls] == ["f"]
    assert parsed.content == ""
    free = AnswerFormat(name, ("f",)).parser()
    free.push(text)
    assert not free.full


ONE = ParsedText(calls=[ToolCall("f", '{"a": 1}')])
CASES: list[tuple[Callable[[], Parser], str, ParsedText]] = [
    (TaggedParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', ONE),
    (TaggedParser, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ONE),
    (TaggedParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ONE),
    (TaggedParser, '<tool_call>{"type": "function", "name": "f", "parameters": {"a": 1}}', ONE),
    (TaggedParser, '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "7"}</tool_call>', ONE),
    # A closing brace or the end marker is missing.
    (TaggedParser, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', ONE),
    (TaggedParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}', ONE),
    (
        TaggedParser,
        'Let me see.\n\n<tool_call>{"name": "f"}</tool_call>\nDone.\n',
        ParsedText(content="Let me see.\nDone.\n", calls=[ToolCall("f", "{}")]),
    ),
    (TaggedParser, "Use <tool_call> tags. ", ParsedText(content="Use <tool_call> tags. ")),
    (TaggedParser, '<tool_call>{"name": 5}', ParsedText(content='<tool_call>{"name": 5}')),
    (
        TaggedParser,  # cut off in the middle
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        ParsedText(calls=[ToolCall("f", '{"a": "x')]),
    ),
    (
        TaggedParser,  # the second attempt is sound
        '<tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        ParsedText(content="<tool_call>", calls=ONE.calls),
    ),
    (
        TaggedParser,  # cut off in the end marker
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool',
        ONE,
    ),
    (coder, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", ONE),
    (coder, "<tool_call><function=f></function>", ParsedText(calls=[ToolCall("f", "{}")])),
    (
        coder,
        "<tool_call>\n<function=f>\n<parameter=α>\n\n a\n</parameter>\n</function>\n"
        "</tool_call>\nOk",
        ParsedText(content="\nOk", calls=[ToolCall("f", '{"α": "\\n a"}')]),
    ),
    (
        coder,  # cut off in a value
        "<tool_call><function=f><parameter=α>\nx\n</para",
        ParsedText(calls=[ToolCall("f", '{"α": "x\\n')]),
    ),
    (
        coder,  # cut off in a value that is no string
        "<tool_call><function=f><parameter=n>\n12</",
        ParsedText(calls=[ToolCall("f", '{"n": 12')]),
    ),
    (
        coder,  # cut off between values
        "<tool_call><function=f><parameter=n>\n12\n</parameter>\n<param",
        ParsedText(calls=[ToolCall("f", '{"n": 12')]),
    ),
    (
        coder,
        '<tool_call>{"name": "f"}</tool_call>',
        ParsedText(content='<tool_call>{"name": "f"}</tool_call>'),
    ),
    (coder, "<tool_call><function=>", ParsedText(content="<tool_call><function=>")),
    (llama3, '{"name": "f", "parameters": {"a": 1}}', ONE),
    (llama3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ONE),
    (llama3, '{"name": "Bob", "age": 5}', ParsedText(content='{"name": "Bob", "age": 5}')),
    (
        llama3,
        'It is {"name": "f", "parameters": {}}',
        ParsedText(content='It is {"name": "f", "parameters": {}}'),
    ),
    (
        llama3,
        'One moment.<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        ParsedText(content="One moment.", calls=ONE.calls),
    ),
    (
        llama3,
        "<|python_tag|>print(1)",
        ParsedText(content="<|python_tag|>print(1)"),
    ),
    (
        chained,
        '<think>\nHm. <tool_call>\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}',
        ParsedText(reasoning="Hm. <tool_call>", calls=ONE.calls),
    ),
    (
        lambda: ReasoningParser(opened=True),
        "Hm.\n</think>\n\nYes.\n",
        ParsedText(reasoning="Hm.", content="Yes.\n"),
    ),
    (
        lambda: ReasoningParser(opened=True),
        "<think>Hm.</think>Yes",
        ParsedText(reasoning="Hm.", content="Yes"),
    ),
    (lambda: ReasoningParser(opened=False), "</think> Yes", ParsedText(content="</think> Yes")),
    (lambda: ReasoningParser(opened=False), "<think>\nI ", ParsedText(reasoning="I ")),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=range(len(CASES)))
def test_examples(make: Callable[[], Parser], text: str, expected: ParsedText) -> None:
    assert parse_whole(make(), text) == expected
    assert parse_chunks(make(), list(text))[0] == expected


def test_arguments_stream_as_they_arrive() -> None:
    parser = TaggedParser()
    text = '<tool_call>{"name": "f", "arguments": {"text": "one two"}}</tool_call>'
    seen = [parser.push(char) for char in text]
    pieces = [piece for step in seen for piece in step]
    assert pieces[0] == CallStart(0, "f")
    assert len(pieces) == 1 + len('{"text": "one two"}')
    assert [step for step, char in zip(seen, text, strict=True) if char == "w"] == [
        [CallArguments(0, "w")]
    ]


def test_a_long_answer_takes_linear_time() -> None:
    """Pieces of a call that never becomes certain are not read again with every token."""
    for make in PARSERS:
        parser = make()
        for _ in range(5_000):
            parser.push('<tool_call>{"arguments": {"a": ["')
        parser.finish()
    for start in ("<parameter=n>", "<parameter=α>", "<parameter="):
        parser = coder()
        parser.push("<tool_call><function=f>" + start)
        for _ in range(50_000):
            parser.push("[1, 2], ")
        parser.finish()
