"""Messages and stream events in Anthropic's form, made from request states."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_minima.parsers.output import OutputParser
from sglang_minima.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from sglang_minima.tokenization.state import RequestState

Event = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What every reply to one call needs to know."""

    id: str
    model: str
    max_tokens: int
    marks_cache: bool
    """The client marked what to cache: it wants to know what was written."""
    page_size: int

    def usage(self, state: RequestState) -> dict[str, Any]:
        """Token counts. The three input counters add up to the prompt.

        Every prompt is cached, in whole pages. What of it was not read from the cache is counted
        as written, up to the last whole page, for clients that use `cache_control`; for others,
        and behind that page, it is plain input.
        """
        prompt = state.prompt_tokens
        read = min(state.cached_tokens, prompt)
        written = max(prompt // self.page_size * self.page_size - read, 0)
        written = written if self.marks_cache else 0
        return {
            "input_tokens": prompt - read - written,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written,
            "output_tokens": state.completion_tokens,
        }

    def message(self, content: list[dict[str, Any]], state: RequestState) -> dict[str, Any]:
        """The message object; while the sequence runs, without a reason to stop."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(state),
        }

    def stop_fields(self, state: RequestState, called: bool) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence` of a finished sequence."""
        finish = state.finish
        reason, sequence = "end_turn", None
        if finish is not None and finish.type == "length":
            full = state.completion_tokens < self.max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif finish is not None and finish.type == "stop" and isinstance(finish.matched, str):
            reason, sequence = "stop_sequence", finish.matched
        elif called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


def whole_message(reply: Reply, state: RequestState, parser: OutputParser) -> dict[str, Any]:
    """The reply to a call without `stream`."""
    blocks: list[dict[str, Any]] = []
    for piece in [*parser.push(state.text), *parser.finish()]:
        block = _new_block(piece)
        if block is not None and (
            block["type"] == "tool_use" or not blocks or blocks[-1]["type"] != block["type"]
        ):
            blocks.append(block)
        key, text = _addition(piece)
        blocks[-1][key] = (blocks[-1][key] or "") + text
    called = False
    for block in blocks:
        if block["type"] == "tool_use":
            called = True
            block["input"] = _arguments(block["input"])
    return {**reply.message(blocks, state), **reply.stop_fields(state, called)}


@dataclass
class MessageStream:
    """One message as it streams: `advance` gives the events that bring a client up to date."""

    reply: Reply
    state: RequestState
    parser: OutputParser
    _text: int = 0
    _blocks: int = 0
    _open: str | None = None
    """Type of the content block that is open."""
    _started: bool = False
    _called: bool = False

    def advance(self) -> Iterator[Event]:
        """Events for what has arrived since the last time."""
        state = self.state
        if not self._started:
            self._started = True
            yield {"type": "message_start", "message": self.reply.message([], state)}
        pieces = self.parser.push(state.text[self._text :])
        self._text = max(self._text, len(state.text))
        if state.finish is not None:
            pieces += self.parser.finish()
        for piece in pieces:
            yield from self._events(piece)
        if state.finish is not None:
            yield from self._close()
            fields = self.reply.stop_fields(state, self._called)
            yield {"type": "message_delta", "delta": fields, "usage": self.reply.usage(state)}
            yield {"type": "message_stop"}

    def _events(self, piece: Piece) -> Iterator[Event]:
        block = _new_block(piece)
        if block is not None and (block["type"] == "tool_use" or block["type"] != self._open):
            yield from self._begin(block)
        key, text = _addition(piece)
        if text:
            kind, field_name = _DELTAS[key]
            delta = {"type": kind, field_name: text}
            yield {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = block["type"]
        self._called = self._called or block["type"] == "tool_use"
        yield {"type": "content_block_start", "index": self._blocks, "content_block": block}
        if self._blocks == 0:
            yield {"type": "ping"}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._blocks}
            self._blocks += 1
            self._open = None


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "input": ("input_json_delta", "partial_json"),
}
"""Field of a block -> type of the deltas that grow it, and their field."""


def _new_block(piece: Piece) -> dict[str, Any] | None:
    """The empty block that a piece belongs to; None when it only continues a call."""
    match piece:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Content():
            return {"type": "text", "text": ""}
        case CallStart(_, name):
            identifier = f"toolu_{uuid.uuid4().hex[:24]}"
            return {"type": "tool_use", "id": identifier, "name": name, "input": {}}
        case CallArguments():
            return None


def _addition(piece: Piece) -> tuple[str, str]:
    """The field that a piece adds to, and what."""
    match piece:
        case Reasoning(text):
            return "thinking", text
        case Content(text):
            return "text", text
        case CallStart():
            return "input", ""
        case CallArguments(_, text):
            return "input", text


def _arguments(text: str) -> dict[str, Any]:
    """The input of a call; text that was cut off, or is no JSON, goes by this name."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
