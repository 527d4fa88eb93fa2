"""Messages in Anthropic's form become messages as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sglang_minima.entrypoints.chat_messages import Message
from sglang_minima.sampling_params import InvalidRequest

Block = dict[str, Any]
_BILLING = "x-anthropic-billing-header:"
"""Some agents put this line, with a number that changes on every call, before everything else in
the system prompt. It says nothing to a model, and no prefix could ever be shared behind it."""


def chat_messages(
    system: str | Sequence[Block] | None, messages: Sequence[dict[str, Any]]
) -> list[Message]:
    """The conversation; tool results become messages of the role "tool".

    Consecutive turns of one side are one turn.

    Raises:
        InvalidRequest: a message is malformed, or has content that is not text.
    """
    if not messages:
        raise InvalidRequest("messages is empty")
    found: list[Message] = []
    texts = _texts("system", system or [])
    text = "\n".join(text for text in texts if not text.startswith(_BILLING))
    if text:
        found.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str | list):
            raise InvalidRequest(f"{where}.content must be a text or a list of blocks")
        if role == "user":
            turns = _user_turns(where, content)
        elif role == "assistant":
            turns = [_assistant_turn(where, content)]
        elif role == "system":
            turns = [{"role": "system", "content": "\n".join(_texts(where, content))}]
        else:
            raise InvalidRequest(f"{where}.role must be user, assistant or system")
        if not turns:
            raise InvalidRequest(f"{where}.content is empty")
        for turn in turns:
            if found and turn["role"] == found[-1]["role"] in ("user", "assistant"):
                _append(found[-1], turn)
            else:
                found.append(turn)
    return found


def _append(message: Message, turn: Message) -> None:
    message["content"] = "\n".join(text for text in (message["content"], turn["content"]) if text)
    if "tool_calls" in turn:
        message["tool_calls"] = [*message.get("tool_calls", []), *turn["tool_calls"]]


def _user_turns(where: str, content: str | list[Any]) -> list[Message]:
    """Tool results, and the text between them."""
    turns: list[Message] = []
    for block in _blocks(where, content):
        if block.get("type") != "tool_result":
            turns.append({"role": "user", "content": _text(where, block)})
            continue
        result = block.get("content")
        texts = _texts(f"{where}: a tool_result", [] if result is None else result)
        identifier = block.get("tool_use_id")
        if not isinstance(identifier, str):
            raise InvalidRequest(f"{where}: a tool_result needs a tool_use_id")
        text = "\n".join(texts)
        turns.append({"role": "tool", "tool_call_id": identifier, "content": text})
    return turns


def _assistant_turn(where: str, content: str | list[Any]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in _blocks(where, content):
        match block.get("type"):
            case "tool_use":
                name, arguments = block.get("name"), block.get("input")
                if not isinstance(name, str) or not isinstance(arguments, dict):
                    raise InvalidRequest(f"{where}: a tool_use needs a name and an input")
                function = {"name": name, "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                continue
            case _:
                texts.append(_text(where, block))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(where: str, content: str | Sequence[Any]) -> list[str]:
    return [_text(where, block) for block in _blocks(where, content)]


def _blocks(where: str, content: Any) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where} must have a text or a list of blocks")
    return content


def _text(where: str, block: Block) -> str:
    kind, text = block.get("type"), block.get("text")
    if kind != "text":
        raise InvalidRequest(f"{where}: blocks of type {json.dumps(kind)} are not supported here")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: a text block needs a text")
    return text
