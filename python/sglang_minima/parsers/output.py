"""`OutputParser`: reasoning, then content and tool calls, of one answer as it streams."""

from __future__ import annotations

from sglang_minima.parsers.pieces import CallArguments, CallStart, Content, Parser, Piece
from sglang_minima.parsers.tool_calls import ToolParser


class OutputParser:
    """Chains the two parsers: tool calls are looked for in what is not reasoning.

    Args:
        reasoning: None when reasoning is not told apart.
        tools: None when the text has no tool calls.
        max_calls: calls beyond this number are left out (None: no limit).
    """

    def __init__(
        self, reasoning: Parser | None, tools: ToolParser | None, max_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls

    @property
    def full(self) -> bool:
        """The last call that the answer may have is complete."""
        if self._tools is None or self._max_calls is None:
            return False
        return self._tools.ended_calls >= self._max_calls

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        pieces: list[Piece]
        if self._reasoning is not None:
            pieces = self._reasoning.push(text)
        else:
            pieces = [Content(text)] if text else []
        return self._find_calls(pieces)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        pieces = [] if self._reasoning is None else self._find_calls(self._reasoning.finish())
        if self._tools is not None:
            pieces += self._within_limit(self._tools.finish())
        return pieces

    def _find_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                found += self._within_limit(self._tools.push(piece.text))
            else:
                found.append(piece)
        return found

    def _within_limit(self, pieces: list[Piece]) -> list[Piece]:
        limit = self._max_calls
        if limit is None:
            return pieces
        return [
            piece
            for piece in pieces
            if not isinstance(piece, CallStart | CallArguments) or piece.call < limit
        ]
