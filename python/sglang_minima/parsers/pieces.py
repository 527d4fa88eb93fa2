"""What parsers make of generated text: reasoning, content and tool calls, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Reasoning(NamedTuple):
    """Text that the model thought aloud."""

    text: str


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins."""

    call: int
    """Number of the call in this answer, from 0."""
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the call that began last: JSON text, as the model wrote it."""

    call: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments


class Parser(Protocol):
    """Splits text that arrives in chunks.

    The pieces depend on the text alone, not on how it was cut into chunks, and no text is lost:
    what turns out not to be a call is content. Text is held back while it may be markup.
    """

    def push(self, text: str) -> list[Piece]:
        """Takes the next chunk; returns what is certain now."""
        ...

    def finish(self) -> list[Piece]:
        """Ends the text; returns what was held back."""
        ...


@dataclass
class ToolCall:
    """One whole call."""

    name: str
    arguments: str = ""


@dataclass
class ParsedText:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Appends pieces."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallStart(_, name):
                    self.calls.append(ToolCall(name))
                case CallArguments(call, text):
                    self.calls[call].arguments += text


def parse_whole(parser: Parser, text: str) -> ParsedText:
    """Parses a text that is complete."""
    parsed = ParsedText()
    parsed.add(parser.push(text))
    parsed.add(parser.finish())
    return parsed


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
