"""Which format a chat template shows; grammars of a format make what its parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_minima.entrypoints.tools import make_tool
from sglang_minima.grammar.spec import Grammar
from sglang_minima.parsers.answer import AnswerFormat
from sglang_minima.parsers.formats import (
    TOOL_FORMATS,
    after_reasoning,
    begins_with_reasoning,
    calls_grammar,
    detect_tool_format,
)
from sglang_minima.parsers.pieces import ParsedText, parse_whole
from sglang_minima.parsers.reasoning import ReasoningParser

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[tuple[str, Any]] = [("weather", CITY), ('say "hi"', {"type": "object"})]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", "qwen3_coder"),
        ('{% if tools %}{"name": f, "parameters": {}}{% endif %}', "llama3"),
        ("{% if tools %}Environment: ipython{% endif %}", "llama3"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", None),
    ],
)
def test_detection(template: str | None, expected: str | None) -> None:
    found = detect_tool_format(template)
    assert (None if found is None else found.name) == expected


@pytest.mark.parametrize(
    ("name", "end", "text", "content"),
    [
        ("qwen3", "assistant\n", "Hm</think>Yes", "Hm</think>Yes"),
        ("qwen3", "assistant\n<think>\n", "Hm</think>Yes", "Yes"),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes", "Yes"),
        ("deepseek-r1", "assistant\n", "Hm</think>Yes", "Yes"),
        ("qwen3-thinking", "assistant\n", "Hm</think>Yes", "Yes"),
        ("deepseek-r1", "<think></think>\n", "Yes", "Yes"),
    ],
)
def test_the_prompt_tells_where_reasoning_begins(
    name: str, end: str, text: str, content: str
) -> None:
    parser = ReasoningParser(begins_with_reasoning(name, end))
    assert parse_whole(parser, text).content == content


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    xgrammar = pytest.importorskip("xgrammar", reason="structured output is not installed")
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(grammar)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.accept_token(256))


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen3_coder"])
def test_grammar_of_forced_calls(name: str) -> None:
    form = TOOL_FORMATS[name]
    rome, oslo = (form.call_text("weather", {"city": city}) for city in ("Rome", "Oslo"))
    hello = form.call_text('say "hi"', {"to": ["you", 1]})
    several = form.separator.join([rome, hello, oslo])
    parallel = calls_grammar(form, TOOLS, required=True, parallel=True)
    single = calls_grammar(form, TOOLS, required=True, parallel=False)
    for text in (rome, oslo, hello):
        assert accepts(parallel, text)
        assert accepts(single, text)
    assert accepts(parallel, several)
    assert not accepts(single, several)
    for wrong in ("", "Well.", form.call_text("weather", {}), form.call_text("weather", {"a": 1})):
        assert not accepts(parallel, wrong)
    assert not accepts(parallel, form.call_text("unknown", {}))
    key = '"city"' if '"city"' in rome else "<parameter=city>"
    assert accepts(parallel, rome.replace(key, " \n  " + key))
    assert not accepts(parallel, rome.replace(key, " " * 100 + key))
    parsed = parse_whole(form.parser(dict(TOOLS)), several)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        ("weather", {"city": "Rome"}),
        ('say "hi"', {"to": ["you", 1]}),
        ("weather", {"city": "Oslo"}),
    ]


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen3_coder"])
def test_a_forced_call_without_parameters_has_no_arguments(name: str) -> None:
    form = TOOL_FORMATS[name]
    for parameters in (None, {}):
        tool = make_tool("now", None, parameters, False, "tools[0]")
        grammar = calls_grammar(form, [(tool.name, tool.schema)], required=True, parallel=False)
        assert accepts(grammar, form.call_text("now", {}))
        assert not accepts(grammar, form.call_text("now", {"a": 1}))


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen3_coder"])
def test_markup_of_a_forced_call_is_never_content(name: str) -> None:
    """Wherever the text is cut off, and however it comes in."""
    form, schemas = TOOL_FORMATS[name], dict(TOOLS)
    calls = [("weather", {"city": "Rome"}), ('say "hi"', {"to": ["you", 1]})]
    text = "\n" + form.separator.join(form.call_text(*call) for call in calls)
    answer = AnswerFormat(name, tuple(schemas), forced=True)
    for end in range(len(text) + 1):
        whole = parse_whole(answer.parser(schemas), text[:end])
        assert whole.content == ""
        parser, streamed = answer.parser(schemas), ParsedText()
        for char in text[:end]:
            streamed.add(parser.push(char))
        streamed.add(parser.finish())
        assert streamed == whole
        names = [call.name for call in whole.calls]
        assert names == [name for name, _ in calls][: len(names)]
        # A call is there once its name is.
        complete = text[:end].count("weather") + text[:end].count("hi")
        assert len(names) >= complete - 1
    assert [json.loads(call.arguments) for call in whole.calls] == [call[1] for call in calls]


@pytest.mark.parametrize("name", ["hermes", "llama3", "qwen3_coder"])
def test_grammar_of_strict_tools_leaves_the_choice(name: str) -> None:
    form = TOOL_FORMATS[name]
    grammar = calls_grammar(form, TOOLS, required=False, parallel=True)
    rome = form.call_text("weather", {"city": "Rome"})
    assert accepts(grammar, "Well, nothing.")
    assert accepts(grammar, "Let me look.\n" + rome)
    assert not accepts(grammar, form.call_text("weather", {"city": "Bonn"}))


def test_calls_may_follow_reasoning() -> None:
    form = TOOL_FORMATS["qwen"]
    calls = Grammar.structural_tag(calls_grammar(form, TOOLS, required=True, parallel=True))
    grammar = after_reasoning(calls).text
    rome = form.call_text("weather", {"city": "Rome"})
    for space in ("", "\n", "\n\n"):
        assert accepts(grammar, f"Rome, then.\n</think>{space}{rome}")
    assert not accepts(grammar, "Rome, then.\n</think>\n\nWell.")
    assert not accepts(grammar, "Rome, then.\n" + rome)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", json.dumps(CITY), '{"city": "Oslo"}', "{}"),
        ("regex", "[a-c]+", "abc", "abd"),
        ("ebnf", 'root ::= "yes" | "no"', "no", "maybe"),
    ],
)
def test_other_grammars_may_follow_reasoning(kind: Any, text: str, good: str, bad: str) -> None:
    grammar = after_reasoning(Grammar.make(kind, text)).text
    assert accepts(grammar, "Hm.</think>\n\n" + good)
    assert not accepts(grammar, "Hm.</think>\n\n" + bad)
