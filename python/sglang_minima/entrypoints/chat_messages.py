"""Messages of a chat: checked, and in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sglang_minima.entrypoints.tools import Tool
from sglang_minima.parsers.formats import ToolFormat
from sglang_minima.sampling_params import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages of an OpenAI client as chat templates take them.

    Raises:
        InvalidRequest: a message is malformed, or has content that is not text.
    """
    if not messages:
        raise InvalidRequest("messages is empty")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Message) -> Message:
    # Templates ask whether a key is there: what clients send as null is not.
    checked = {key: value for key, value in message.items() if value is not None}
    role, content = checked.get("role"), checked.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}")
    # Newer clients call the system role "developer"; templates only know the old name.
    checked["role"] = "system" if role == "developer" else role
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = [_part(where, part) for part in content]
    elif not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a text or a list of text parts")
    checked["content"] = content
    if "tool_calls" in checked:
        if role != "assistant" or not isinstance(checked["tool_calls"], list):
            raise InvalidRequest(f"{where}.tool_calls must be a list in an assistant's message")
        calls = [_call(where, call) for call in checked.pop("tool_calls")]
        if calls:
            checked["tool_calls"] = calls
    return checked


def _part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{where}.content: only parts of type text are supported")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.content: a text part needs a text")
    return part


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.tool_calls: a call needs a function with a name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        raise InvalidRequest(f"{where}.tool_calls: arguments must be JSON text")
    return {
        **call,
        "type": "function",
        "function": {"name": function["name"], "arguments": call_arguments(arguments)},
    }


def call_arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments as an object, which templates print as JSON; text that is none stays text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{manner}"""
"""In words of Qwen 2.5 and Hermes, which models of many families have seen."""


def spell_out_tools(
    messages: Sequence[Message], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[Message]:
    """Tools, calls and results as plain text, for a chat template that knows nothing of them.

    The tools are described in the system message, calls stand in the assistant's text, and
    results become messages of the user.
    """
    spelled: list[Message] = []
    after_result = False
    for message in messages:
        if message["role"] == "tool":
            content = f"<tool_response>\n{_plain(message['content'])}\n</tool_response>"
            if after_result:
                spelled[-1]["content"] += "\n" + content
            else:
                spelled.append({"role": "user", "content": content})
            after_result = True
            continue
        after_result = False
        message = dict(message)
        calls = [
            tool_format.call_text(call["function"]["name"], call["function"]["arguments"])
            for call in message.pop("tool_calls", [])
        ]
        if calls:
            content = _plain(message["content"])
            message["content"] = "\n".join([*([content] if content else []), *calls])
        spelled.append(message)
    if tools:
        specs = "\n".join(json.dumps(tool.spec(), ensure_ascii=False) for tool in tools)
        text = _INTRODUCTION.format(tools=specs, manner=tool_format.manner)
        if spelled[0]["role"] == "system":
            content = f"{_plain(spelled[0]['content'])}\n\n{text}"
            spelled[0] = {**spelled[0], "content": content}
        else:
            spelled.insert(0, {"role": "system", "content": text})
    return spelled


def one_call_a_turn(messages: Sequence[Message]) -> list[Message]:
    """Messages in which an assistant's turn has one call at most, and its result follows it: for
    templates that refuse several calls in a turn."""
    split: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            split.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for index, call in enumerate(calls):
            content = "" if index else message["content"]
            split.append({**message, "content": content, "tool_calls": [call]})
            last = index == len(calls) - 1
            own = [r for r in results if last or r.get("tool_call_id") == call.get("id")]
            results = [result for result in results if result not in own]
            split += own
    return split


def _plain(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
