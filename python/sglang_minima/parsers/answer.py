"""`AnswerFormat`: what stands in the answers of one request, for every process that reads them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sglang_minima.parsers.formats import TOOL_FORMATS
from sglang_minima.parsers.output import OutputParser
from sglang_minima.parsers.reasoning import ReasoningParser
from sglang_minima.parsers.schema_types import Schema


class AnswerFormat(msgspec.Struct, frozen=True, array_like=True):
    """How an answer is to be read."""

    tool_format: str | None = None
    """A key of `TOOL_FORMATS`; None when the text has no tool calls."""
    tool_names: tuple[str, ...] = ()
    """Tools that may be called."""
    max_calls: int | None = None
    """Calls beyond this number are none of the answer's (None: no limit)."""
    reasoning: bool = False
    """Reasoning is told apart."""
    reasons_first: bool = False
    """The answer is reasoning from its first character on."""
    forced: bool = False
    """The answer must be calls: what begins like one is one, also where it is cut off."""

    def parser(self, schemas: Mapping[str, Schema] | None = None) -> OutputParser:
        """A parser of one answer.

        Args:
            schemas: of the tools' arguments, by name. Only the text of the arguments depends on
                them, in formats that write it without JSON's types.
        """
        tools = None
        if self.tool_format is not None:
            known = schemas or {}
            named = {name: known.get(name, {}) for name in self.tool_names}
            tools = TOOL_FORMATS[self.tool_format].parser(named)
            tools.forced = self.forced
        reasoning = ReasoningParser(self.reasons_first) if self.reasoning else None
        return OutputParser(reasoning, tools, self.max_calls)
