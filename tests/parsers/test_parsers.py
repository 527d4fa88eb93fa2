"""Parsers of generated text: the same result however it is cut, and nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from sglang_minima.parsers.tool_calls import HermesParser, Llama3Parser

NAMES = ("weather", "f", 'a"b', "get time")


def llama3() -> Llama3Parser:
    return Llama3Parser(NAMES)


def chained() -> OutputParser:
    return OutputParser(ReasoningParser(opened=False), HermesParser())


def chained_opened() -> OutputParser:
    return OutputParser(ReasoningParser(opened=True), Llama3Parser(NAMES))


PARSERS: list[Callable[[], Parser]] = [
    HermesParser,
    llama3,
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
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
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
    parsed, _ = parse_chunks(HermesParser(), cut(data, text))
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


ONE = ParsedText(calls=[ToolCall("f", '{"a": 1}')])
CASES: list[tuple[Callable[[], Parser], str, ParsedText]] = [
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', ONE),
    (HermesParser, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ONE),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ONE),
    (HermesParser, '<tool_call>{"type": "function", "name": "f", "parameters": {"a": 1}}', ONE),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "7"}</tool_call>', ONE),
    # A closing brace or the end marker is missing.
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', ONE),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}', ONE),
    (
        HermesParser,
        'Let me see.\n\n<tool_call>{"name": "f"}</tool_call>\nDone.\n',
        ParsedText(content="Let me see.\nDone.\n", calls=[ToolCall("f", "{}")]),
    ),
    (HermesParser, "Use <tool_call> tags. ", ParsedText(content="Use <tool_call> tags. ")),
    (HermesParser, '<tool_call>{"name": 5}', ParsedText(content='<tool_call>{"name": 5}')),
    (
        HermesParser,  # cut off in the middle
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        ParsedText(calls=[ToolCall("f", '{"a": "x')]),
    ),
    (
        HermesParser,  # the second attempt is sound
        '<tool_call>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        ParsedText(content="<tool_call>", calls=ONE.calls),
    ),
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
    parser = HermesParser()
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
