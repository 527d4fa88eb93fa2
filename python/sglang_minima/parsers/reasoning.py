"""`ReasoningParser`: parts what a model thought, between <think> and </think>, from its answer."""

from __future__ import annotations

from enum import Enum, auto

from sglang_minima.parsers.pieces import Content, Piece, Reasoning, partial_marker

THINK = "<think>"
END_THINK = "</think>"
_SPACE = " \t\r\n"


class _State(Enum):
    BEFORE = auto()
    OPENED = auto()
    THINKING = auto()
    CLOSED = auto()
    ANSWER = auto()


class ReasoningParser:
    """Reasoning stands at the beginning of a text. White space around the tags belongs to them.

    Args:
        opened: the prompt has opened the reasoning, or the model always reasons: the text is
            reasoning from its first character on, with or without the opening tag.
    """

    def __init__(self, opened: bool) -> None:
        self._state = _State.OPENED if opened else _State.BEFORE
        self._text = ""
        self._space = ""
        """White space at the end of the reasoning so far."""

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._text += text
        return self._advance(final=False)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        pieces = self._advance(final=True)
        if self._space:
            pieces.append(Reasoning(self._space))
            self._space = ""
        return pieces

    def _advance(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state in (_State.BEFORE, _State.OPENED) and not self._pass_tag(final):
            return pieces
        if self._state is _State.THINKING:
            self._think(final, pieces)
        if self._state is _State.CLOSED:
            self._text = self._text.lstrip(_SPACE)
            if self._text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER and self._text:
            pieces.append(Content(self._text))
            self._text = ""
        return pieces

    def _pass_tag(self, final: bool) -> bool:
        """Takes the opening tag; False while it may still come."""
        body = self._text.lstrip(_SPACE)
        if not body.startswith(THINK):
            if not final and THINK.startswith(body):
                return False
            if self._state is _State.BEFORE:
                self._state = _State.ANSWER
                return True
        body = body.removeprefix(THINK).lstrip(_SPACE)
        if not body and not final:
            return False
        self._state = _State.THINKING
        self._text = body
        return True

    def _think(self, final: bool, pieces: list[Piece]) -> None:
        found = self._text.find(END_THINK)
        held = 0 if final else partial_marker(self._text, END_THINK)
        end = found if found >= 0 else len(self._text) - held
        thought = self._text[:end]
        self._text = self._text[end:]
        body = thought.rstrip(_SPACE)
        if body:
            pieces.append(Reasoning(self._space + body))
            self._space = ""
        self._space += thought[len(body) :]
        if found >= 0:
            self._space = ""
            self._text = self._text[len(END_THINK) :]
            self._state = _State.CLOSED
