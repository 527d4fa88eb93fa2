"""Where one sequence stands in its grammar."""

from __future__ import annotations

import time

import torch
import xgrammar

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
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_ids: frozenset[int]) -> None:
        stops = sorted(stop_ids)
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops or None)
        self._vocab_size: int = compiled.tokenizer_info.vocab_size
        self.stop_ids = frozenset(self._matcher.stop_token_ids)
        self._cost = 0.0
        self._left = SPARE_SECONDS
        """CPU time that may still be used, without that of the tokens to come."""

    def fill(self, mask: torch.Tensor, banned: frozenset[int]) -> None:
        """Writes which tokens may come next.

        Args:
            mask: int32 [ceil(vocab / 32)] on the CPU; bit t % 32 of word t // 32 is token t.
            banned: tokens that are not wanted; ignored when no other may come.
        """
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
        started = time.thread_time()
        if not self._matcher.accept_token(token):
            return "the grammar allows no continuation"
        cost = self._cost + time.thread_time() - started
        self._left += SECONDS_A_TOKEN - cost
        if cost > SLOW_SECONDS or self._left < 0:
            return "the grammar is too ambiguous to be followed"
        return None
