"""Follows a compiled grammar for a while, to see what that costs."""

from __future__ import annotations

import random
import time

import torch
import xgrammar

from sglang_minima.grammar.constraint import Constraint
from sglang_minima.grammar.failed import FailedGrammars
from sglang_minima.grammar.spec import Grammar
from sglang_minima.runner.token_masks import mask_words

TOKENS = 48
SLOW_SECONDS = 0.1
"""CPU time that one token may take. Very ambiguous grammars exceed it soon, and it only grows."""


def trial(
    compiled: xgrammar.CompiledGrammar,
    eos: frozenset[int],
    grammar: Grammar,
    source: random.Random,
) -> str | None:
    """Draws tokens that the grammar allows; returns what is wrong with it, if anything is."""
    constraint = Constraint(compiled, eos, grammar, FailedGrammars())
    mask = torch.zeros(mask_words(compiled.tokenizer_info.vocab_size), dtype=torch.int32)
    for step in range(TOKENS):
        started = time.process_time()
        constraint.fill(mask, constraint.stop_ids)
        token = _draw(mask, source)
        if token is None:
            return "matches no text that the model's tokens can spell" if step == 0 else None
        if token in constraint.stop_ids:
            return None
        constraint.accept(token)
        if time.process_time() - started > SLOW_SECONDS:
            return "is too ambiguous to be followed token by token"
    return None


def _draw(mask: torch.Tensor, source: random.Random) -> int | None:
    """One of the allowed tokens: a word that is not zero, then one of its bits."""
    words = mask.nonzero().flatten().tolist()
    if not words:
        return None
    word = source.choice(words)
    value = int(mask[word]) & 0xFFFFFFFF
    return int(word * 32 + source.choice([bit for bit in range(32) if value >> bit & 1]))
