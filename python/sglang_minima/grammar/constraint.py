"""Where one sequence stands in its grammar."""

from __future__ import annotations

import time

import torch
import xgrammar

from sglang_minima.grammar.failed import AMBIGUOUS, FailedGrammars
from sglang_minima.grammar.spec import Grammar
from sglang_minima.runner.token_masks import clear_padding, forbid

SLOW_SECONDS = 0.25
"""CPU time that following a grammar may take at one token. It grows from token to token where a
grammar is very ambiguous: such a sequence must end before the others wait for it."""
SPARE_SECONDS = 0.5
SECONDS_A_TOKEN = 0.01
"""CPU time that following a grammar may take in all: so much a token, and some to spare. Ordinary
grammars take a hundredth of it."""


class Constraint:
    """Follows one sequence through a compiled grammar.

    It sees every sampled token once, in order; a preemption changes nothing, because the tokens of
    the sequence stay what they are.

    Args:
        compiled: the grammar, shared by all sequences that follow it.
        stop_ids: tokens that may end the sequence where the grammar is complete.
        grammar: what was compiled.
        failed: grammars that took too long in any sequence; this one may be added, and if another
            sequence adds it, this one ends without another look at it.
    """

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        stop_ids: frozenset[int],
        grammar: Grammar,
        failed: FailedGrammars,
    ) -> None:
        stops = sorted(stop_ids)
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops or None)
        self._vocab_size: int = compiled.tokenizer_info.vocab_size
        self.stop_ids = frozenset(self._matcher.stop_token_ids)
        self._grammar = grammar
        self._failed = failed
        self._cost = 0.0
        self._last_cost = 0.0
        self._left = SPARE_SECONDS
        """CPU time that may still be used, without that of the tokens to come."""

    @property
    def slow(self) -> bool:
        """The next token is likely to take long: not many such sequences at once."""
        return self._last_cost > SECONDS_A_TOKEN and self._grammar not in self._failed

    def fill(self, mask: torch.Tensor, banned: frozenset[int]) -> None:
        """Writes which tokens may come next.

        Args:
            mask: int32 [ceil(vocab / 32)] on the CPU; bit t % 32 of word t // 32 is token t.
            banned: tokens that are not wanted; ignored when no other may come.
        """
        if self._grammar in self._failed:
            # Whatever comes is refused; it must not look like the end of a complete text.
            mask.fill_(-1)
            clear_padding(mask, self._vocab_size)
            forbid(mask, self.stop_ids)
            return
        started = time.thread_time()
        self._matcher.fill_next_token_bitmask(mask.unsqueeze(0))
        clear_padding(mask, self._vocab_size)
        if banned:
            allowed = mask.clone()
            forbid(mask, banned)
            if not mask.any():
                mask.copy_(allowed)
        self._cost = time.thread_time() - started

    def accept(self, token: int) -> str | None:
        """Moves on by a sampled token; returns why the sequence cannot go on, if it cannot."""
        if self._grammar in self._failed:
            return AMBIGUOUS
        started = time.thread_time()
        if not self._matcher.accept_token(token):
            return "the grammar allows no continuation"
        cost = self._cost + time.thread_time() - started
        self._last_cost = cost
        self._left += SECONDS_A_TOKEN - cost
        if cost > SLOW_SECONDS or self._left < 0:
            self._failed.add(self._grammar)
            return AMBIGUOUS
        return None
