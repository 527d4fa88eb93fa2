"""Tools and reasoning in chats, driven by the real `openai` client; the fake scheduler answers with
the script that stands in the last message."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from server_kit import RunningServer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted.url + "/v1", api_key="sesame", max_retries=0)


def ask(client: openai.OpenAI, script: str, **options: Any) -> Any:
    options = {"tools": [WEATHER, TIME], "messages": [], **options}
    messages = [*options.pop("messages"), {"role": "user", "content": f"Answer ⟦{script}⟧"}]
    return client.chat.completions.create(model="any", messages=messages, **options)


def collect(chunks: Any) -> dict[str, Any]:
    """What a client puts together from the deltas of one choice."""
    seen: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        if not chunk.choices:
            seen["usage"] = chunk.usage
            continue
        choice = chunk.choices[0]
        assert seen["finish"] is None
        seen["finish"] = choice.finish_reason
        seen["content"] += choice.delta.content or ""
        seen["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(seen["calls"]):
                assert call.type == "function"
                seen["calls"].append([call.id, call.function.name, ""])
            else:
                assert call.index == len(seen["calls"]) - 1
                assert (call.id, call.function.name) == (None, None)
            seen["calls"][-1][2] += call.function.arguments
    return seen


def test_a_call(client: openai.OpenAI) -> None:
    reply = ask(client, ONE)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Zürich"}


def test_calls_with_text_before(client: openai.OpenAI) -> None:
    message = ask(client, "Let me look.\n" + TWO).choices[0].message
    assert message.content == "Let me look."
    assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize("start", ["", "Let me look.\n", "<think>\nHm.\n</think>\n"])
def test_one_call_only_when_parallel_calls_are_off(client: openai.OpenAI, start: str) -> None:
    """The answer ends with its first call: no token is generated behind it."""
    script = start + TWO
    reply = ask(client, script, parallel_tool_calls=False, n=2)
    stream = ask(
        client,
        script,
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_usage": True},
    )
    seen = collect(stream)
    first = start + ONE.removesuffix("\n</tool_call>")
    for choice in reply.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert choice.finish_reason == seen["finish"] == "tool_calls"
        assert (choice.message.content or "") == seen["content"]
        assert json.loads(call.function.arguments) == {"city": "Zürich"}
        assert call.function.arguments == seen["calls"][0][2]
    assert [name for _, name, _ in seen["calls"]] == ["weather"]
    # The model's tokens are bytes.
    assert reply.usage.completion_tokens == 2 * len(first.encode())
    assert seen["usage"].completion_tokens == len(first.encode())


def test_a_broken_call_does_not_end_the_answer(client: openai.OpenAI) -> None:
    script = f'<tool_call>{{"call": 1}}</tool_call> {TWO} Done.'
    message = ask(client, script, parallel_tool_calls=False).choices[0].message
    assert message.content == '<tool_call>{"call": 1}</tool_call>'
    assert len(message.tool_calls) == 1


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    "choice",
    [
        allowed("auto"),
        allowed("sometimes", "weather"),
        allowed("auto", "nothing"),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["weather"]}},
        {"type": "allowed_tools", "mode": "auto"},
    ],
)
def test_bad_allowed_tools(client: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(client, ONE, tool_choice=choice)


def test_all_tools_allowed_is_auto(client: openai.OpenAI) -> None:
    message = ask(client, TWO, tool_choice=allowed("auto", "time", "weather")).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "time"]


@pytest.mark.parametrize("options", [{"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}])
def test_without_tools_text_stays_text(client: openai.OpenAI, options: Any) -> None:
    choice = ask(client, ONE, **options).choices[0]
    assert choice.message.content == ONE
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_broken_call_is_content(client: openai.OpenAI) -> None:
    choice = ask(client, '<tool_call>{"call": 1}').choices[0]
    assert choice.message.content == '<tool_call>{"call": 1}'
    assert choice.finish_reason == "stop"


def test_call_that_is_cut_off(client: openai.OpenAI) -> None:
    choice = ask(client, ONE, max_tokens=55).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city"')


@pytest.mark.parametrize("count", [1, 2])
def test_streamed_calls(client: openai.OpenAI, count: int) -> None:
    chunks = list(
        ask(
            client,
            "Let me look.\n" + TWO,
            stream=True,
            n=count,
            stream_options={"include_usage": True},
        )
    )
    for index in range(count):
        mine = [c for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].choices[0].delta.role == "assistant"
        seen = collect(mine)
        assert seen["content"] == "Let me look."
        assert [(name, json.loads(text)) for _, name, text in seen["calls"]] == [
            ("weather", {"city": "Zürich"}),
            ("time", {}),
        ]
        assert all(call_id.startswith("call_") for call_id, _, _ in seen["calls"])
        assert seen["finish"] == "tool_calls"
    # The arguments came in many deltas.
    assert sum(bool(c.choices and c.choices[0].delta.tool_calls) for c in chunks) > 10 * count
    assert chunks[-1].usage.completion_tokens > 100


def test_history_reaches_the_model(client: openai.OpenAI, scripted: RunningServer) -> None:
    """A template without tools gets them spelled out: what the model sees comes back by echo."""
    history: list[Any] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "How is it in Zürich?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "9 C"}]},
    ]
    body = {"messages": history, "tools": [WEATHER]}
    headers = {"Authorization": "Bearer sesame"}
    ids = scripted.post("/tokenize", body, headers=headers).json()["tokens"]
    prompt = scripted.post("/detokenize", {"tokens": ids}, headers=headers).json()["text"]
    assert prompt.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert '"description": "The weather in a city"' in prompt
    assert prompt.endswith(
        "<|im_start|>user\nHow is it in Zürich?<|im_end|>\n"
        f"<|im_start|>assistant\n{ONE}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\n9 C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_reasoning(client: openai.OpenAI) -> None:
    script = "<think>\nHm, weather.\n</think>\n\nLook:\n" + ONE
    reply = ask(client, script)
    message = reply.choices[0].message
    assert message.reasoning_content == "Hm, weather."
    assert message.content == "Look:"
    assert message.tool_calls[0].function.name == "weather"
    assert reply.usage.reasoning_tokens == len("Hm, weather.")
    assert reply.usage.completion_tokens_details.reasoning_tokens == len("Hm, weather.")
    seen = collect(ask(client, script, stream=True, stream_options={"include_usage": True}))
    assert (seen["reasoning"], seen["content"]) == ("Hm, weather.", "Look:")
    assert [name for _, name, _ in seen["calls"]] == ["weather"]
    assert seen["usage"].reasoning_tokens == len("Hm, weather.")
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage for chunk in ask(client, script, stream=True, stream_options=options)]
    assert [count.reasoning_tokens for count in counts] == sorted(
        count.reasoning_tokens for count in counts
    )
    assert counts[-1] == seen["usage"]


def test_reasoning_can_stay_in_the_content(client: openai.OpenAI) -> None:
    script = "<think>Hm</think>Yes"
    options: dict[str, Any] = {"tools": openai.NOT_GIVEN}
    message = ask(client, script, extra_body={"separate_reasoning": False}, **options)
    assert message.choices[0].message.content == script
    assert message.choices[0].message.reasoning_content is None
    split = ask(client, script, **options).choices[0].message
    assert (split.reasoning_content, split.content) == ("Hm", "Yes")


def test_logprobs_of_held_back_text(client: openai.OpenAI) -> None:
    chunks = list(ask(client, ONE, stream=True, logprobs=True, top_logprobs=1))
    tokens = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert tokens[-1] == "<|im_end|>"
    assert len(tokens) == len(ONE.encode()) + 1


def test_input_ids_in_place_of_messages(client: openai.OpenAI) -> None:
    ids = [2 + byte - ord("!") for byte in b"abc"]
    reply = client.chat.completions.create(
        model="any", messages=[], max_tokens=6, extra_body={"input_ids": ids}
    )
    assert reply.choices[0].message.content == "abcabc"


def test_async_client(scripted: RunningServer) -> None:
    async def run() -> tuple[Any, dict[str, Any]]:
        async with openai.AsyncOpenAI(base_url=scripted.url + "/v1", api_key="sesame") as client:
            options: dict[str, Any] = {
                "model": "any",
                "messages": [{"role": "user", "content": f"⟦{ONE}⟧"}],
                "tools": [WEATHER],
            }
            whole = await client.chat.completions.create(**options)
            stream = await client.chat.completions.create(stream=True, **options)
            return whole, collect([chunk async for chunk in stream])

    whole, seen = asyncio.run(run())
    arguments = whole.choices[0].message.tool_calls[0].function.arguments
    assert arguments == seen["calls"][0][2] == '{"city": "Zürich"}'


def test_wrong_key(scripted: RunningServer) -> None:
    client = openai.OpenAI(base_url=scripted.url + "/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        ask(client, ONE)
