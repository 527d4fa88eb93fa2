"""Forced and strict tool calls on the real server: the embedded model hardly ever calls a tool by
itself, so what it says here is what the grammar makes it say."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_kit import RunningServer

pytest.importorskip("xgrammar", reason="structured output is not installed")

CITIES = ["Paris", "Rome", "Oslo"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": CITIES},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Rome for two days?"}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"tools": [WEATHER, TIME], "max_tokens": 96, "temperature": 0, **options}
    return client.chat.completions.create(model="any", messages=QUESTION, **options)


def check_weather(arguments: str) -> None:
    value = json.loads(arguments)
    assert set(value) == {"city", "days"}
    assert value["city"] in CITIES
    assert 1 <= value["days"] <= 9


NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_named_tool(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    check_weather(call.function.arguments)


def test_named_tool_streams_its_arguments(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice=NAMED).choices[0].message.tool_calls[0].function.arguments
    pieces = []
    for chunk in ask(client, tool_choice=NAMED, stream=True):
        delta = chunk.choices[0].delta
        assert not delta.content
        pieces += [call.function.arguments for call in delta.tool_calls or []]
    assert pieces[0] == ""
    assert len(pieces) > 3
    assert "".join(pieces) == whole


def test_required(client: openai.OpenAI) -> None:
    reply = ask(
        client, tool_choice="required", parallel_tool_calls=False, n=3, temperature=1, seed=5
    )
    for choice in reply.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name in ("get_weather", "get_time")
        if call.function.name == "get_weather":
            check_weather(call.function.arguments)


def test_required_allows_several_calls(client: openai.OpenAI) -> None:
    """However often a weak model calls: every call but one that is cut off is whole."""
    choice = ask(client, tools=[WEATHER], tool_choice="required").choices[0]
    calls = choice.message.tool_calls
    assert calls
    whole = calls if choice.finish_reason == "tool_calls" else calls[:-1]
    for call in whole:
        check_weather(call.function.arguments)


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(client: openai.OpenAI) -> None:
    """The prompt shows all tools, the grammar only lets the allowed ones be called."""
    options: dict[str, Any] = {"parallel_tool_calls": False, "n": 4, "temperature": 1, "seed": 2}
    reply = ask(client, tool_choice=allowed("required", "get_time"), **options)
    for choice in reply.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_time"
    everything = ask(client, tool_choice="required", **options)
    assert reply.usage.prompt_tokens == everything.usage.prompt_tokens
    both = ask(client, tool_choice=allowed("required", "get_time", "get_weather"), **options)
    names = [choice.message.tool_calls[0].function.name for choice in both.choices]
    assert names == [choice.message.tool_calls[0].function.name for choice in everything.choices]


def test_allowed_tools_leave_the_choice_of_answering(client: openai.OpenAI) -> None:
    free = ask(client, tool_choice=allowed("auto", "get_time"), max_tokens=12)
    plain = ask(client, max_tokens=12)
    assert free.choices[0].message.content == plain.choices[0].message.content


def test_strict_tools_leave_the_choice(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    free = ask(client, tools=[strict], max_tokens=12)
    plain = ask(client, tools=[WEATHER], max_tokens=12)
    assert free.choices[0].message.content == plain.choices[0].message.content


def test_grammars_exclude_each_other(client: openai.OpenAI) -> None:
    for extra in ({"regex": "a"}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, tool_choice="required", extra_body=extra)
        assert caught.value.status_code == 400


def test_schema_that_cannot_be_followed(client: openai.OpenAI) -> None:
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "wizard"}}}}
    with pytest.raises(openai.BadRequestError):
        ask(client, tools=[{"type": "function", "function": bad}], tool_choice="required")


def test_messages_with_forced_tools(server: RunningServer) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tool = {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "input_schema": WEATHER["function"]["parameters"],  # type: ignore[index]
    }
    one = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **one}, {"type": "tool", "name": "get_weather"}):
        options: dict[str, Any] = {
            "model": "any",
            "max_tokens": 96,
            "messages": QUESTION,
            "extra_body": {"temperature": 0},
            "tools": [tool],
            "tool_choice": choice,
        }
        message = client.messages.create(**options)
        (block,) = message.content
        assert message.stop_reason == "tool_use"
        check_weather(json.dumps(block.input))
        with client.messages.stream(**options) as stream:
            assert stream.get_final_message().content[0].input == block.input
    # The second turn reads the first from the cache.
    history = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [block.model_dump(include={"type", "id", "name", "input"})],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees"}],
        },
    ]
    reply = client.messages.create(model="any", max_tokens=8, messages=history, tools=[tool])
    page = server.get("/server_info").json()["page_size"]
    assert reply.usage.cache_read_input_tokens >= page
    assert reply.usage.input_tokens < reply.usage.cache_read_input_tokens


def test_json_comes_to_an_end(client: openai.OpenAI) -> None:
    """White space is bounded: even a small model closes its object."""
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
    reply = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "A person as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
        max_tokens=160,
        temperature=0,
    )
    assert reply.choices[0].finish_reason == "stop"
    assert set(json.loads(reply.choices[0].message.content or "")) == {"name", "age"}


def test_structured_output_of_messages(server: RunningServer) -> None:
    body = {
        "max_tokens": 64,
        "temperature": 0,
        "messages": QUESTION,
        "output_config": {"format": {"type": "json_schema", "schema": {"enum": ["rain", "sun"]}}},
    }
    reply = server.post("/v1/messages", body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["content"][0]["text"] in ('"rain"', '"sun"')
