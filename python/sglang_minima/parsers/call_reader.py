"""`CallReader`: reads one JSON object that calls a tool, in pieces, and streams its arguments."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'[^"\\]*')
_IN_VALUE = re.compile(r"[\s\w,:.+-]*")
"""What JSON may have between strings and brackets."""
_ARGUMENT_KEYS = ("arguments", "parameters")
_IGNORED_KEYS = ("type", "id")


class Outcome(Enum):
    """How the reading of a call ended."""

    CLOSED = auto()
    FAILED = auto()


class _State(Enum):
    OPEN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    STRING = auto()
    COLON = auto()
    VALUE = auto()
    ARGUMENTS = auto()
    NEXT = auto()


class CallReader:
    """Reads {"name": "f", "arguments": {...}} (or "parameters"), members in any order.

    `name` is set when the call is certain: it has a name, and arguments have begun or the object
    has ended. From then on `take_arguments` gives their text as it arrives. An object that is no
    call fails before that, and nothing of it was given out. Arguments may also be a string that
    holds a JSON object, as some models write them.

    Args:
        names: the tools that may be called; None for any.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self.name: str | None = None
        self.outcome: Outcome | None = None
        self.unsettled = ""
        """Text read that nothing given out accounts for: it must not be lost on a failure."""
        self._names = names
        self._state = _State.OPEN
        self._key = ""
        self._string: list[str] = []
        self._escaped = False
        self._known_name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = False
        self._depth = 0
        self._quoted = False

    def feed(self, text: str, position: int) -> int:
        """Reads on from `position`; returns where it stopped: at the end of the text, behind the
        object, or at the character that failed."""
        while position < len(text) and self.outcome is None:
            if self._state is _State.ARGUMENTS:
                position = self._read_arguments(text, position)
            elif self._state is _State.STRING:
                position = self._read_string(text, position)
            else:
                self.unsettled += text[position]
                if self._step(text[position]):
                    position += 1
                else:
                    self.unsettled = self.unsettled[:-1]
                    self.outcome = Outcome.FAILED
        return position

    def take_arguments(self) -> str:
        """The text of the arguments since the last time; empty while the call is not certain."""
        if self.name is None:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def finish(self, forced: bool) -> None:
        """The text has ended inside the object; nothing of its arguments is held back.

        Args:
            forced: the object must be a call: a name makes it one.
        """
        if forced and self.name is None and self._known_name is not None:
            self._settle()

    def _step(self, char: str) -> bool:
        """One character outside strings and arguments; False when it cannot stand here."""
        if char in _SPACE:
            return True
        match self._state:
            case _State.OPEN if char == "{":
                self._state = _State.FIRST_KEY
            case _State.FIRST_KEY | _State.KEY if char == '"':
                self._begin_string("")
            case _State.COLON if char == ":":
                self._state = _State.VALUE
            case _State.VALUE if char == "{" and self._key in _ARGUMENT_KEYS:
                return self._begin_arguments(char)
            case _State.VALUE if char == '"':
                self._begin_string(self._key)
            case _State.NEXT if char == ",":
                self._state = _State.KEY
            case _State.NEXT if char == "}":
                return self._close()
            case _:
                return False
        return True

    def _skip(self, plain: re.Pattern[str], text: str, position: int) -> int:
        """Where, from `position` on, the first character stands that is not `plain`, the one behind
        a backslash passed over."""
        if self._escaped:
            self._escaped = False
            position += 1
        match = plain.match(text, position)
        assert match is not None
        return match.end()

    def _begin_string(self, key: str) -> None:
        self._state = _State.STRING
        self._key = key
        self._string.clear()

    def _read_string(self, text: str, position: int) -> int:
        start = position
        while position < len(text):
            position = self._skip(_IN_STRING, text, position)
            if position == len(text):
                break
            if text[position] == '"':
                self._string.append(text[start:position])
                self.unsettled += text[start : position + 1]
                if not self._end_string("".join(self._string)):
                    self.outcome = Outcome.FAILED
                return position + 1
            self._escaped = True
            position += 1
        self._string.append(text[start:position])
        self.unsettled += text[start:position]
        return position

    def _end_string(self, raw: str) -> bool:
        """A key or a string value is complete; False when it makes no call."""
        value = _decode(raw)
        if value is None:
            return False
        key = self._key
        if not key:
            self._key = value
            self._state = _State.COLON
            known = value == "name" or value in _ARGUMENT_KEYS or value in _IGNORED_KEYS
            return known and bool(value)
        self._state = _State.NEXT
        if key == "name":
            if self._known_name is not None or not value:
                return False
            self._known_name = value
            return not self._has_arguments or self._settle()
        if key in _ARGUMENT_KEYS:
            if self._has_arguments or not _is_object(value):
                return False
            self._has_arguments = True
            self._arguments.append(value)
            return self._known_name is None or self._settle()
        return True

    def _begin_arguments(self, char: str) -> bool:
        if self._has_arguments:
            return False
        self._has_arguments = True
        self._state = _State.ARGUMENTS
        self._depth = 1
        self._arguments.append(char)
        return self._known_name is None or self._settle()

    def _read_arguments(self, text: str, position: int) -> int:
        start = position
        while position < len(text):
            position = self._skip(_IN_STRING if self._quoted else _IN_VALUE, text, position)
            if position == len(text):
                break
            char = text[position]
            if self._quoted and char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = not self._quoted
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            else:
                self.outcome = Outcome.FAILED
                break
            position += 1
            if self._depth == 0:
                self._state = _State.NEXT
                break
        read = text[start:position]
        self._arguments.append(read)
        if self.name is None:
            self.unsettled += read
        return position

    def _close(self) -> bool:
        if self._known_name is None:
            return False
        if self.name is None:
            self._arguments.append("{}")
            if not self._settle():
                return False
        self.outcome = Outcome.CLOSED
        return True

    def _settle(self) -> bool:
        """The call is certain, if there is such a tool."""
        if self._names is not None and self._known_name not in self._names:
            return False
        self.name = self._known_name
        self.unsettled = ""
        return True


def _decode(raw: str) -> str | None:
    """The value of a JSON string without its quotes; None when it is none."""
    try:
        value = json.loads(f'"{raw}"', strict=False)
        value.encode()
    except ValueError:
        return None
    return str(value)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
