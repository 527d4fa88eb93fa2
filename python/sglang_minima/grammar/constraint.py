"""Where one sequence stands in its grammar, and the token masks of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import xgrammar

_WORD = 32
"""Tokens in one word of a mask."""
SLOW_SECONDS = 0.25
"""CPU time that following a grammar may take at one token. It grows from token to token where a
grammar is very ambiguous: such a sequence must end before the others wait for it."""


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

    def fill(self, mask: torch.Tensor, banned: frozenset[int]) -> None:
        """Writes which tokens may come next.

        Args:
            mask: int32 [ceil(vocab / 32)] on the CPU; bit t % 32 of word t // 32 is token t.
            banned: tokens that are not wanted; ignored when no other may come.
        """
        started = time.thread_time()
        self._matcher.fill_next_token_bitmask(mask.unsqueeze(0))
        if banned:
            allowed = mask.clone()
            for token in banned:
                mask[token // _WORD] &= ~_bit(token)
            if not mask.any():
                mask.copy_(allowed)
        self._cost = time.thread_time() - started

    def accept(self, token: int) -> str | None:
        """Moves on by a sampled token; returns why the sequence cannot go on, if it cannot."""
        started = time.thread_time()
        if not self._matcher.accept_token(token):
            return "the grammar allows no continuation"
        if self._cost + time.thread_time() - started > SLOW_SECONDS:
            return "the grammar is too ambiguous to be followed"
        return None


def _bit(token: int) -> int:
    """The bit of a token in its word, as a signed 32-bit number."""
    shift = token % _WORD
    return 1 << shift if shift < _WORD - 1 else -(1 << shift)


def masks(
    constraints: Sequence[Constraint], banned: Sequence[frozenset[int]], vocab_size: int
) -> torch.Tensor:
    """Masks of several sequences: int32 [n, ceil(vocab / 32)] on the CPU.

    A sequence that has no continuation gets a mask that allows everything: what is sampled then is
    refused by `Constraint.accept`.
    """
    words = torch.zeros(len(constraints), -(-vocab_size // _WORD), dtype=torch.int32)
    for row, (constraint, unwanted) in enumerate(zip(constraints, banned, strict=True)):
        constraint.fill(words[row], unwanted)
        if not words[row].any():
            words[row] = -1
    return words


def apply_masks(logits: torch.Tensor, rows: Sequence[int], words: torch.Tensor) -> None:
    """Sets the logits of tokens that may not come to -inf, in place.

    Args:
        logits: float32 [batch, vocab].
        rows: the rows that have a mask.
        words: int32 [len(rows), ceil(vocab / 32)] on the CPU.
    """
    device = logits.device
    shifts = torch.arange(_WORD, dtype=torch.int32, device=device)
    bits = (words.to(device).unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[-1]] == 0
    index = torch.tensor(rows, device=device)
    logits[index] = logits[index].masked_fill(forbidden, -torch.inf)
