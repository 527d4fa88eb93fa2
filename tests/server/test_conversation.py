"""From a conversation to a prompt, with a chat template that knows tools and reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_minima.entrypoints.chat_messages import check_messages
from sglang_minima.entrypoints.chat_types import ChatBody
from sglang_minima.entrypoints.conversation import ChatRenderer, Conversation
from sglang_minima.entrypoints.tools import ToolChoice, openai_tools
from sglang_minima.grammar.spec import Grammar
from sglang_minima.parsers.pieces import ParsedText, ToolCall, parse_whole
from sglang_minima.sampling_params import InvalidRequest, SamplingParams
from sglang_minima.tokenization.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}Tools (<tool_call>): {{ tools | tojson }}; {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}; {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir, TEMPLATE)


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer, reasoning_parser="qwen3")


def prompt_of(renderer: ChatRenderer, tokenizer: Tokenizer, chat: Conversation) -> str:
    return tokenizer.decode(renderer.render(chat).prompt, skip_special_tokens=False)


def test_tools_and_calls_reach_the_template(renderer: ChatRenderer, tokenizer: Tokenizer) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages: list[dict[str, Any]] = [
        USER,
        # As clients send back what they got, with nulls.
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": None,
            "tool_calls": [{"id": "1", "index": 0, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "content": "Rain.", "tool_calls": None},
    ]
    tools = openai_tools([WEATHER])
    chat = Conversation(check_messages(messages), tools, ToolChoice("auto"))
    prompt = prompt_of(renderer, tokenizer, chat)
    assert prompt == (
        f"Tools (<tool_call>): {json.dumps([WEATHER])}; "
        'user: Hi; assistant: [weather {"city": "Rome"}]; tool: rain; assistant: Rain.; assistant: '
    )
    without = Conversation(check_messages(messages), tools, ToolChoice("none"))
    assert prompt_of(renderer, tokenizer, without) == prompt[prompt.index("user: ") :]


def test_reasoning_follows_the_prompt(renderer: ChatRenderer) -> None:
    plain = renderer.render(Conversation([USER]))
    thinking = renderer.render(Conversation([USER], template_arguments={"enable_thinking": True}))
    text = "Hm.\n</think>\n\nYes."
    assert parse_whole(plain.make_parser(), text) == ParsedText(content=text)
    assert parse_whole(thinking.make_parser(), text) == ParsedText("Hm.", "Yes.")
    sampling = SamplingParams(grammar=Grammar("regex", "a+"))
    assert plain.guide(sampling) == sampling
    found = thinking.guide(sampling).grammar
    assert found is not None and found.kind == "structural_tag"
    assert thinking.guide(SamplingParams()) == SamplingParams()


def test_one_call_at_most(renderer: ChatRenderer) -> None:
    tools = openai_tools([WEATHER])
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    one = renderer.render(Conversation([USER], tools, ToolChoice("auto"), parallel=False))
    assert parse_whole(one.make_parser(), call + call).calls == [ToolCall("weather", "{}")]
    assert one.guide(SamplingParams()).until_calls == one.answer
    forced = renderer.render(Conversation([USER], tools, ToolChoice("required"), parallel=False))
    # There the grammar ends with the first call.
    assert forced.guide(SamplingParams()).until_calls is None
    several = renderer.render(Conversation([USER], tools, ToolChoice("auto")))
    assert several.guide(SamplingParams()).until_calls is None
    assert len(parse_whole(several.make_parser(), call + call).calls) == 2


@pytest.mark.parametrize(
    ("mode", "text", "expected"),
    [
        ("required", '\n<tool_call>\n{"', ParsedText()),
        (
            "required",
            '\n<tool_call>\n{"name": "weather", ',
            ParsedText(calls=[ToolCall("weather")]),
        ),
        ("auto", '\n<tool_call>\n{"', ParsedText(content='\n<tool_call>\n{"')),
    ],
)
def test_a_call_that_is_cut_off(
    renderer: ChatRenderer, mode: Any, text: str, expected: ParsedText
) -> None:
    chat = renderer.render(Conversation([USER], openai_tools([WEATHER]), ToolChoice(mode)))
    assert parse_whole(chat.make_parser(), text) == expected


def test_grammar_only_where_it_is_asked_for(renderer: ChatRenderer) -> None:
    tools = openai_tools([WEATHER])
    strict = openai_tools(
        [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]  # type: ignore[dict-item]
    )

    def kind(chosen: Any, choice: ToolChoice) -> str | None:
        tag = renderer.render(Conversation([USER], chosen, choice)).structural_tag
        return None if tag is None else str(json.loads(tag)["format"]["type"])

    assert kind(tools, ToolChoice("auto")) is None
    assert kind(strict, ToolChoice("auto")) == "triggered_tags"
    assert kind(tools, ToolChoice("required")) == "tags_with_separator"
    assert kind(strict, ToolChoice("none")) is None
    other = {"type": "function", "function": {"name": "time"}}
    both = openai_tools([WEATHER, other])
    for allowed, expected in (({"time"}, "triggered_tags"), ({"time", "weather"}, None)):
        assert kind(both, ToolChoice("auto", allowed=frozenset(allowed))) == expected


ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}"
    "[{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}{{ m.role }}: {{ m.content }}{% endif %}; {% endfor %}"
    "{% if tools %}<tool_call>{% endif %}"
)


def test_several_calls_in_a_turn_that_the_template_refuses(model_dir: Path) -> None:
    """As the templates of Llama 3: each call gets a turn, with its own result behind it."""
    tokenizer = Tokenizer.load(model_dir, ONE_CALL)
    renderer = ChatRenderer(tokenizer)

    def call(number: int) -> dict[str, Any]:
        function = {"name": "weather", "arguments": f'{{"n": {number}}}'}
        return {"id": f"call_{number}", "type": "function", "function": function}

    def result(number: int) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"r{number}"}

    def prompt(*messages: dict[str, Any]) -> str:
        chat = Conversation(check_messages([USER, *messages]))
        return prompt_of(renderer, tokenizer, chat).partition("user: Hi; ")[2]

    several = {"role": "assistant", "content": None, "tool_calls": [call(1), call(2), call(3)]}
    shuffled = [result(3), result(1), result(2)]
    bye = {"role": "user", "content": "Bye"}
    assert prompt(several, *shuffled, bye) == (
        '[weather{"n": 1}]; tool: r1; [weather{"n": 2}]; tool: r2; [weather{"n": 3}]; tool: r3; '
        "user: Bye; "
    )
    # What belongs to no call stays, behind the last one.
    lost = {"role": "tool", "content": "lost"}
    assert prompt(several, result(2), lost) == (
        '[weather{"n": 1}]; [weather{"n": 2}]; tool: r2; [weather{"n": 3}]; tool: lost; '
    )
    assert prompt({**several, "tool_calls": [call(1)]}) == '[weather{"n": 1}]; '


TRIMMING = (
    "{% for m in messages %}<{{ m.role }}>\n\n{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n\n{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("", "<assistant>\n\n"),
        (None, "<assistant>\n\n"),
        ([], "<assistant>\n\n"),
        ("Sure, ", "<assistant>\n\nSure,"),
        ([{"type": "text", "text": "Sure"}], "<assistant>\n\nSure"),
        ("Hi", "<assistant>\n\nHi"),
    ],
)
def test_continuing_the_last_message(model_dir: Path, content: Any, end: str) -> None:
    """Of templates that trim: what is continued is neither cut nor closed, also where it is
    empty."""
    tokenizer = Tokenizer.load(model_dir, TRIMMING)
    messages = [USER, {"role": "assistant", "content": content}]
    body = ChatBody(messages=messages, continue_final_message=True)
    chat = body.conversation(tokenizer.vocab_size)
    prompt = prompt_of(ChatRenderer(tokenizer), tokenizer, chat)
    assert prompt == "<user>\n\nHi<end>" + end


def test_unknown_tool_format_is_told(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(
        model_dir, "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ messages }}"
    )
    chat = Conversation([USER], openai_tools([WEATHER]), ToolChoice("auto"))
    with pytest.raises(InvalidRequest, match="--tool-call-parser"):
        ChatRenderer(tokenizer).render(chat)
    assert ChatRenderer(tokenizer, "llama3").render(chat).prompt


def test_template_that_fails_is_a_bad_request(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir, "{{ raise_exception('no') }}{% if x %}{{ x }}{% endif %}")
    with pytest.raises(InvalidRequest, match="no"):
        ChatRenderer(tokenizer).render(Conversation([USER]))
