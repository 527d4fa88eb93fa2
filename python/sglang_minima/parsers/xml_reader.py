"""`XmlCallReader`: reads one tool call in the XML of Qwen3-Coder and streams its arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto

from sglang_minima.parsers.call_reader import Outcome
from sglang_minima.parsers.pieces import partial_marker
from sglang_minima.parsers.schema_types import Schema, is_text, json_text

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_END_MARKERS = (END_PARAMETER, "\n" + END_PARAMETER)
_SPACE = " \t\r\n"
MAX_NAME = 1024
"""Characters of the longest name that is waited for."""


class _State(Enum):
    FUNCTION = auto()
    NEXT = auto()
    VALUE = auto()


class XmlCallReader:
    """Reads <function=f> <parameter=p> value </parameter> ... </function>.

    The interface is that of `CallReader`. Arguments become the text of a JSON object. A value is
    text without quotes: the schema says what it is. Strings stream; other values come out whole.
    One line break before a value and one behind it belong to the format.

    Args:
        schemas: of the tools' arguments, by name.
    """

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self.name: str | None = None
        self.outcome: Outcome | None = None
        self.unsettled = ""
        self._schemas = schemas
        self._state = _State.FUNCTION
        self._parameter: Schema = True
        """Schema of the value that is being read."""
        self._begun = False
        """Some of the value has been taken."""
        self._value: list[str] = []
        """What has been taken of a value that is no string."""
        self._arguments: list[str] = []
        self._count = 0

    def feed(self, text: str, position: int) -> int:
        """See `CallReader.feed`."""
        held = len(self.unsettled)
        self.unsettled += text[position:]
        while self.outcome is None and self._step():
            continue
        if self.outcome is Outcome.CLOSED:
            # What follows the call is not for this reader: it lies within the new text.
            rest, self.unsettled = len(self.unsettled), ""
            assert rest <= held + len(text) - position
            return len(text) - rest
        return len(text)

    def finish(self, forced: bool) -> None:
        """The text has ended inside the call: what was held back of a value is part of it."""
        if self._state is _State.VALUE:
            text = self._without_break()
            self._take_value(text[: len(text) - partial_marker(text, END_PARAMETER)])
            self._arguments += self._value
            self.unsettled = ""
        elif self._state is _State.NEXT:
            body = self.unsettled.lstrip(_SPACE)
            if PARAMETER.startswith(body) or END_FUNCTION.startswith(body):
                self.unsettled = ""

    def take_arguments(self) -> str:
        """See `CallReader.take_arguments`."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _step(self) -> bool:
        """Reads the next part; False when more text is needed first."""
        if self._state is _State.VALUE:
            return self._read_value()
        body = self.unsettled.lstrip(_SPACE)
        if self._state is _State.FUNCTION:
            return self._read_head(body, FUNCTION)
        if body.startswith(END_FUNCTION):
            self._arguments.append("}" if self._count else "{}")
            self.unsettled = body[len(END_FUNCTION) :]
            self.outcome = Outcome.CLOSED
            return False
        if END_FUNCTION.startswith(body):
            return False
        return self._read_head(body, PARAMETER)

    def _read_head(self, body: str, marker: str) -> bool:
        """Reads the name behind a marker, up to the closing bracket."""
        if not body.startswith(marker):
            if not marker.startswith(body):
                self.outcome = Outcome.FAILED
            return False
        name, bracket, rest = body[len(marker) :].partition(">")
        if not bracket and len(name) <= MAX_NAME and "\n" not in name:
            return False
        if not bracket or not name.strip(_SPACE):
            self.outcome = Outcome.FAILED
            return False
        self.unsettled = rest
        self._enter(marker, name.strip(_SPACE))
        return True

    def _enter(self, marker: str, name: str) -> None:
        if marker == FUNCTION:
            self.name = name
            self._state = _State.NEXT
            return
        assert self.name is not None
        schema = self._schemas.get(self.name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._parameter = properties.get(name, True) if isinstance(properties, dict) else True
        opening = ", " if self._count else "{"
        self._arguments.append(f"{opening}{json.dumps(name, ensure_ascii=False)}: ")
        self._count += 1
        self._begun = False
        self._state = _State.VALUE

    def _read_value(self) -> bool:
        found = self.unsettled.find(END_PARAMETER)
        if found < 0:
            text = self._without_break()
            held = (partial_marker(text, marker) for marker in _END_MARKERS)
            certain = text[: len(text) - max(held)]
            if certain:
                self._take_value(certain)
                self.unsettled = text[len(certain) :]
            return False
        rest = self.unsettled[found + len(END_PARAMETER) :]
        self.unsettled = self.unsettled[:found].removesuffix("\n")
        self._take_value(self._without_break())
        if is_text(self._parameter):
            self._arguments.append('"')
        else:
            self._arguments.append(json_text("".join(self._value), self._parameter))
            self._value.clear()
        self.unsettled = rest
        self._state = _State.NEXT
        return True

    def _without_break(self) -> str:
        """What is held of the value, without the line break that opens it."""
        return self.unsettled if self._begun else self.unsettled.removeprefix("\n")

    def _take_value(self, text: str) -> None:
        """More of the value is certain."""
        if not is_text(self._parameter):
            self._value.append(text)
        else:
            opening = "" if self._begun else '"'
            self._arguments.append(opening + json.dumps(text, ensure_ascii=False)[1:-1])
        self._begun = True
