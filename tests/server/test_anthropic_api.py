"""`/v1/messages`, driven by the real `anthropic` client; the fake scheduler answers with the script
that stands in the last message, one token a byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import requests
from server_kit import RunningServer

from sglang_minima.entrypoints.anthropic_messages import chat_messages

anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")

WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
PAGE = 16
KEY = {"x-api-key": "sesame"}


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> Any:
    return anthropic.Anthropic(base_url=scripted.url, api_key="sesame", max_retries=0)


def options_of(script: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Answer ⟦{script}⟧"}]
    return {"model": "any", "max_tokens": 400, "messages": messages, **options}


def ask(client: Any, script: str, **options: Any) -> Any:
    return client.messages.create(**options_of(script, **options))


def test_text(client: Any) -> None:
    message = ask(client, "Hello.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "any")
    assert message.id.startswith("msg_")
    assert [block.text for block in message.content] == ["Hello."]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len("Hello.") + 1


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.type == "model"
    assert model.display_name == model.id
    assert model.created_at.tzinfo is not None
    assert client.models.retrieve(model.id) == model


def test_stop_sequence_and_limit(client: Any) -> None:
    message = ask(client, "one, two; three", stop_sequences=[";"])
    assert message.content[0].text == "one, two"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ";")
    assert ask(client, "Hello.", max_tokens=3).stop_reason == "max_tokens"
    assert ask(client, "Hello.", max_tokens=0).content == []


def test_tool_use(client: Any) -> None:
    message = ask(client, "Let me look.\n" + CALL, tools=[WEATHER])
    text, call = message.content
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Zürich"})
    assert call.id.startswith("toolu_")
    assert message.stop_reason == "tool_use"
    none = ask(client, CALL, tools=[WEATHER], tool_choice={"type": "none"})
    assert none.content[0].text == CALL


def test_one_tool_use_only(client: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(client, CALL + "\n" + CALL, tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


def test_a_call_that_is_cut_off(client: Any) -> None:
    message = ask(client, CALL, tools=[WEATHER], max_tokens=60)
    assert message.stop_reason == "max_tokens"
    assert message.content[0].input["INVALID_JSON"].startswith('{"city": "')


def test_thinking(client: Any) -> None:
    message = ask(client, "<think>\nHm.\n</think>\n\nYes.", thinking={"type": "adaptive"})
    thought, text = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert text.text == "Yes."


def names_and_data(server: RunningServer, body: dict[str, Any]) -> list[tuple[str, Any]]:
    reply = requests.post(
        server.url + "/v1/messages?beta=true",
        json={**body, "stream": True},
        headers=KEY,
        timeout=60,
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.content.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name.removeprefix("event: ") == body["type"]
        events.append((body["type"], body))
    return events


def test_exact_sequence_of_events(scripted: RunningServer) -> None:
    script = "<think>Hm.</think>Look:" + CALL
    events = names_and_data(scripted, options_of(script, tools=[WEATHER]))
    kinds = [name for name, _ in events]
    # Deltas of one block follow one another; here each run of them counts once.
    runs = [name for i, name in enumerate(kinds) if i == 0 or kinds[i - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs == [
        "message_start",
        "content_block_start",
        "ping",
        *block[1:],
        *block,
        *block,
        "message_delta",
        "message_stop",
    ]
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2]
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0
    started = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [entry["type"] for entry in started] == ["thinking", "text", "tool_use"]
    assert started[2]["input"] == {}
    deltas = [data for name, data in events if name == "content_block_delta"]
    assert {data["delta"]["type"] for data in deltas if data["index"] == 2} == {"input_json_delta"}
    final = events[-2][1]
    assert final["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert final["usage"]["output_tokens"] == len(script.encode()) + 1


def test_streams_add_up_to_the_whole_message(client: Any) -> None:
    script = "<think>Hm.</think>Look:\n" + CALL + "\n" + CALL
    whole = ask(client, script, tools=[WEATHER])
    with client.messages.stream(**options_of(script, tools=[WEATHER])) as stream:
        assert "".join(stream.text_stream) == "Look:"
        message = stream.get_final_message()

    def plain(found: Any) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in found.content]

    assert plain(message) == plain(whole)
    assert message.stop_reason == whole.stop_reason == "tool_use"
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_async_client(scripted: RunningServer) -> None:
    async def run() -> Any:
        client = anthropic.AsyncAnthropic(base_url=scripted.url, api_key="sesame")
        async with client, client.messages.stream(**options_of("Hello.")) as stream:
            return await stream.get_final_message()

    assert asyncio.run(run()).content[0].text == "Hello."


def test_usage_counters(client: Any) -> None:
    """The fake scheduler says that two tokens came from the cache."""
    plain = ask(client, "Hello.").usage
    total = client.messages.count_tokens(
        model="any", messages=options_of("Hello.")["messages"]
    ).input_tokens
    assert plain.cache_read_input_tokens == 2
    assert plain.cache_creation_input_tokens == 0
    assert plain.input_tokens == total - 2
    block = {"type": "text", "text": "Answer ⟦Hello.⟧", "cache_control": {"type": "ephemeral"}}
    marked = ask(client, "", messages=[{"role": "user", "content": [block]}]).usage
    assert marked.cache_read_input_tokens == 2
    assert marked.cache_creation_input_tokens == total // PAGE * PAGE - 2
    assert marked.input_tokens == total % PAGE
    everywhere: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    }
    assert ask(client, "Hello.", **everywhere).usage.cache_creation_input_tokens > 0


def test_what_the_chat_template_gets() -> None:
    history = [
        {"role": "user", "content": "How is it"},
        {"role": "user", "content": [{"type": "text", "text": "in Zürich?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Z"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "rain"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=123;"},
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": "Be brief."},
    ]
    function = {"name": "weather", "arguments": {"city": "Z"}}
    assert chat_messages(system, history) == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "How is it\nin Zürich?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]


def test_prefill_is_continued(client: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    # Five special tokens; the others are one byte each. Nothing ends the last turn.
    text = "system\nS\nuser\nHi\nassistant\nWell,"
    count = client.messages.count_tokens(model="any", messages=messages, system="S")
    assert count.input_tokens == len(text) + 5
    reply = client.messages.create(model="any", max_tokens=2, messages=messages, system="S")
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == len(text) + 5


ONE = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": ONE["messages"]}, "max_tokens"),
    ({**ONE, "max_tokens": -1}, "max_tokens"),
    ({**ONE, "messages": []}, "empty"),
    ({**ONE, "messages": [{"role": "user", "content": []}]}, "empty"),
    ({**ONE, "messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({**ONE, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({**ONE, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    ({**ONE, "messages": [{"role": "user", "content": ["text"]}]}, "blocks"),
    ({**ONE, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ({**ONE, "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "tool_use"),
    ({**ONE, "system": [{"type": "image"}]}, "system"),
    ({**ONE, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
    ({**ONE, "tools": [{"name": "f"}]}, "input_schema"),
    ({**ONE, "tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({**ONE, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
    ({**ONE, "tool_choice": {"type": "any"}}, "tools"),
    ({**ONE, "temperature": -1}, "temperature"),
    ({**ONE, "stop_sequences": [""]}, "stop_sequences"),
    ({**ONE, "output_config": {"format": {"type": "xml"}}}, "output_config"),
    ({**ONE, "output_format": {"type": "xml"}}, "output_config.format must be"),
    ({**ONE, "response_format": {"type": "json_object"}}, "use output_config.format"),
    ({**ONE, "guided_regex": "a"}, "guided_regex is no field of this API"),
    ({**ONE, "tools": [{**WEATHER, "name": "w" * 129}]}, "1 to 128 letters"),
    ({**ONE, "messages": [{"role": "user", "content": "x" * 9000}]}, "context"),
]


@pytest.mark.parametrize(("body", "expected"), BAD, ids=range(len(BAD)))
def test_bad_requests(scripted: RunningServer, body: dict[str, Any], expected: str) -> None:
    reply = requests.post(scripted.url + "/v1/messages", json=body, headers=KEY, timeout=60)
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert expected in error["error"]["message"]
    assert "\n" not in error["error"]["message"]


def test_keys(scripted: RunningServer) -> None:
    url = scripted.url + "/v1/messages"
    good: dict[str, dict[str, str]] = {"x": KEY, "bearer": {"Authorization": "Bearer sesame"}}
    for headers in good.values():
        assert requests.post(url, json=ONE, headers=headers, timeout=60).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}):
        reply = requests.post(url, json=ONE, headers=headers, timeout=60)
        assert reply.status_code == 401
        assert reply.json()["error"]["type"] == "authentication_error"
    client = anthropic.Anthropic(base_url=scripted.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        ask(client, "Hello.")
    reply = requests.get(scripted.url + "/v1/models", headers=KEY, timeout=60)
    assert reply.status_code == 200
