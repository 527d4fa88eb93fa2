"""Grammars that passed their trial and then were too slow to follow."""

from __future__ import annotations

from collections import OrderedDict

from sglang_minima.grammar.spec import Grammar

AMBIGUOUS = "the grammar is too ambiguous to be followed"
"""Why a sequence ends whose grammar takes too long; those that come later are refused with it."""
MAX_FAILED = 4096
_FAILED_CHARACTERS = 32 << 20


class FailedGrammars:
    """A set of grammars with a bound: the ones that failed longest ago are forgotten."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[Grammar, None] = OrderedDict()
        self._characters = 0

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._grammars

    def __len__(self) -> int:
        return len(self._grammars)

    def add(self, grammar: Grammar) -> None:
        """Remembers that a grammar failed."""
        if grammar in self._grammars:
            return
        self._grammars[grammar] = None
        self._characters += len(grammar.text)
        while len(self._grammars) > MAX_FAILED or self._characters > _FAILED_CHARACTERS:
            dropped, _ = self._grammars.popitem(last=False)
            self._characters -= len(dropped.text)
