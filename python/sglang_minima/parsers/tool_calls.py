"""Parsers of the tool-call formats: between <tool_call> tags, and Llama 3's JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from sglang_minima.parsers.call_reader import CallReader, Outcome
from sglang_minima.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    partial_marker,
)

_SPACE = " \t\r\n"


class Reader(Protocol):
    """Reads one call; see `CallReader`."""

    name: str | None
    outcome: Outcome | None
    unsettled: str

    def feed(self, text: str, position: int) -> int: ...

    def finish(self, forced: bool) -> None: ...

    def take_arguments(self) -> str: ...


class ToolParser:
    """What the formats share: text held back, white space around calls, the call being read.

    White space between content and a call, and between calls, belongs to the format: it is given
    out only when content follows (or follows content at the end).
    """

    marker: str
    """What a call begins with."""

    forced: bool = False
    """Where the text ends inside a call, what cannot be told of it is left out, not content."""

    def __init__(self) -> None:
        self._text = ""
        """Not looked at yet."""
        self._space = ""
        """White space that is content only if more content follows it."""
        self._calls = 0
        self._after_call = False
        """Only white space since the last call."""
        self._reader: Reader | None = None
        self._pieces: list[Piece] = []

    @property
    def ended_calls(self) -> int:
        """Calls that have come to their end."""
        reading = self._reader is not None and self._reader.name is not None
        return self._calls - reading

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._text += text
        return self._advance(final=False)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        pieces = self._advance(final=True)
        if not self._after_call and not self.forced and self._space:
            pieces.append(Content(self._space))
        self._space = ""
        return pieces

    def _advance(self, final: bool) -> list[Piece]:
        self._pieces = []
        while self._step(final):
            continue
        return self._pieces

    def _step(self, final: bool) -> bool:
        """Reads some of the text; False when more text is needed first."""
        raise NotImplementedError

    def _add_content(self, text: str) -> None:
        """Gives out content, except white space at its end."""
        body = text.rstrip(_SPACE)
        if not body:
            self._space += text
            return
        self._pieces.append(Content(self._space + body))
        self._space = text[len(body) :]
        self._after_call = False

    def _read_content(self, final: bool) -> bool:
        """Content up to the next marker; True when the marker stands there now."""
        found = self._text.find(self.marker)
        held = partial_marker(self._text, self.marker) if self.forced or not final else 0
        end = found if found >= 0 else len(self._text) - held
        self._add_content(self._text[:end])
        self._text = self._text[end:]
        if final and found < 0:
            self._text = ""
        return found >= 0

    def _read_call(self, reader: Reader, final: bool) -> None:
        """Feeds the call that is being read and gives out what is certain of it."""
        before = reader.name
        self._text = self._text[reader.feed(self._text, 0) :]
        if final and reader.outcome is None:
            reader.finish(self.forced)
        if before is None and reader.name is not None:
            # What stood before a call, and white space between calls, is not content.
            self._space = ""
            self._pieces.append(CallStart(self._calls, reader.name))
            self._calls += 1
        arguments = reader.take_arguments()
        if arguments:
            self._pieces.append(CallArguments(self._calls - 1, arguments))


class TaggedParser(ToolParser):
    """`<tool_call>...</tool_call>`, any number of them in a text.

    Format: chat templates of Hermes 2 Pro and later, and of Qwen 2.5 and Qwen 3, where
    {"name": ..., "arguments": ...} stands between the tags, and of Qwen3-Coder (`XmlCallReader`).

    Args:
        make_reader: a reader of what stands between the tags.
    """

    marker = "<tool_call>"
    end_marker = "</tool_call>"

    def __init__(self, make_reader: Callable[[], Reader] = CallReader) -> None:
        super().__init__()
        self._make_reader = make_reader

    def _step(self, final: bool) -> bool:
        if self._reader is None:
            if self._after_call and not self._end_of_call(final):
                return False
            if not self._read_content(final):
                return False
            self._text = self._text[len(self.marker) :]
            self._reader = self._make_reader()
            return True
        reader = self._reader
        self._read_call(reader, final)
        if reader.outcome is None and not final:
            return False
        self._reader = None
        if reader.outcome is Outcome.CLOSED:
            self._after_call = True
        elif self.forced and reader.outcome is None:
            return False
        elif reader.name is None:
            # No call: the marker is content, what follows it is looked at again.
            self._add_content(self.marker)
            self._text = reader.unsettled + self._text
        else:
            self._after_call = True
            self._text = reader.unsettled + self._text
        return bool(self._text)

    def _end_of_call(self, final: bool) -> bool:
        """Takes the end marker, or its beginning where the text ends; False while more of it may
        still come."""
        body = self._text.lstrip(_SPACE)
        if body.startswith(self.end_marker):
            self._text = body[len(self.end_marker) :]
        elif self.end_marker.startswith(body):
            if not final:
                return False
            self._text = ""
        return True


class Llama3Parser(ToolParser):
    """`{"name": ..., "parameters": ...}` as the whole answer, or several with `;` between them.

    A call begins the text, or follows a call or the token <|python_tag|>; there must be a tool of
    its name, else it is content. Format: the JSON tool calls of Llama 3.1 and 3.2.

    Args:
        names: of the tools.
    """

    marker = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._expecting = True
        """A call may begin here."""
        self._before = ""
        """What was passed over since content ended: content, unless a call follows."""

    def _step(self, final: bool) -> bool:
        if self._reader is not None:
            return self._continue_call(self._reader, final)
        if self._expecting:
            return self._look_for_call(final)
        if not self._read_content(final):
            return False
        self._expecting = True
        return True

    def _look_for_call(self, final: bool) -> bool:
        separators = _SPACE + ";," if self._after_call else _SPACE
        body = self._text.lstrip(separators)
        self._before += self._text[: len(self._text) - len(body)]
        self._text = body
        if body.startswith("{"):
            self._reader = CallReader(self._names)
            return True
        if body.startswith(self.marker) and self.marker not in self._before:
            self._before += self.marker
            self._text = body[len(self.marker) :]
            return True
        if self.marker.startswith(body) and (self.forced or not final):
            return False
        self._give_up()
        return bool(self._text)

    def _continue_call(self, reader: Reader, final: bool) -> bool:
        self._read_call(reader, final)
        if reader.name is not None:
            self._before = ""
        if reader.outcome is None and not final:
            return False
        self._reader = None
        if self.forced and reader.outcome is None:
            return False
        if reader.name is None:
            self._before += reader.unsettled
            self._give_up()
            return bool(self._text)
        self._after_call = True
        if reader.outcome is not Outcome.CLOSED:
            self._text = reader.unsettled + self._text
        return bool(self._text)

    def _give_up(self) -> None:
        """No call here: what was passed over is content."""
        self._expecting = False
        self._add_content(self._before)
        self._before = ""
