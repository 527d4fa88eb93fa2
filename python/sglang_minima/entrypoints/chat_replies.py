"""Choices of a chat completion, whole and as stream chunks."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from sglang_minima.entrypoints.openai_replies import TokenBytes, chat_logprobs, finish_fields
from sglang_minima.parsers.output import OutputParser
from sglang_minima.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    ParsedText,
    Piece,
    Reasoning,
    parse_whole,
)
from sglang_minima.tokenization.state import RequestState

Choice = dict[str, Any]
_RUNNING = {"finish_reason": None, "matched_stop": None}


def call_id() -> str:
    """A new id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def chat_choice(
    index: int, state: RequestState, parser: OutputParser, token_bytes: TokenBytes | None
) -> tuple[Choice, ParsedText]:
    """A finished choice, and what its text was parsed into; log-probabilities of tokens are part
    of it when their bytes can be told."""
    parsed = parse_whole(parser, state.text)
    calls = [
        {
            "id": call_id(),
            "index": number,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(parsed.calls)
    ]
    made = state.output_logprobs
    choice = {
        "index": index,
        "message": {
            "role": "assistant",
            "content": None if calls and not parsed.content else parsed.content,
            "reasoning_content": parsed.reasoning or None,
            "tool_calls": calls or None,
        },
        "logprobs": (
            None if token_bytes is None else chat_logprobs(made.tokens, made.top, token_bytes)
        ),
        **_finish(state, bool(calls)),
    }
    return choice, parsed


@dataclass
class ChatStream:
    """One choice of a stream: `advance` gives the chunks that bring a client up to date."""

    index: int
    state: RequestState
    parser: OutputParser
    token_bytes: TokenBytes | None
    """None: without log-probabilities."""
    parsed: ParsedText = field(default_factory=ParsedText)
    _text: int = 0
    _tokens: int = 0
    _started: bool = False

    def advance(self) -> list[Choice]:
        """Chunks for what has arrived since the last time."""
        state, chunks = self.state, []
        if not self._started:
            self._started = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        pieces = self.parser.push(state.text[self._text :])
        self._text = max(self._text, len(state.text))
        if state.finish is not None:
            pieces += self.parser.finish()
        self.parsed.add(pieces)
        deltas = [self._chunk(_delta(piece)) for piece in pieces]
        logprobs = self._new_logprobs()
        if logprobs is not None:
            # Tokens whose text is held back come with an empty delta.
            if not deltas:
                deltas.append(self._chunk({"content": ""}))
            deltas[0]["logprobs"] = logprobs
        chunks += deltas
        if state.finish is not None:
            chunks.append({**self._chunk({}), **_finish(state, bool(self.parsed.calls))})
        return chunks

    def _chunk(self, delta: dict[str, Any]) -> Choice:
        return {"index": self.index, "delta": delta, "logprobs": None, **_RUNNING}

    def _new_logprobs(self) -> dict[str, Any] | None:
        made = self.state.output_logprobs
        if self.token_bytes is None or len(made.tokens) == self._tokens:
            return None
        first, self._tokens = self._tokens, len(made.tokens)
        return chat_logprobs(made.tokens[first:], made.top[first:], self.token_bytes)


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _finish(state: RequestState, called: bool) -> dict[str, Any]:
    fields = finish_fields(state)
    if called and fields["finish_reason"] == "stop":
        fields["finish_reason"] = "tool_calls"
    return fields
