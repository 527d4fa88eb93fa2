"""Token masks: one bit a token of the vocabulary says whether it may come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from minima_kernels.upload import upload

_WORD = 32
"""Tokens in one word of a mask; bit t % 32 of word t // 32 is token t."""


class FillsMask(Protocol):
    """What decides which tokens may come next in one sequence."""

    def fill(self, mask: torch.Tensor, banned: frozenset[int]) -> None:
        """Writes int32 [ceil(vocab / 32)] on the CPU; `banned` tokens only where nothing else is
        left."""
        ...


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // _WORD)


def clear_padding(mask: torch.Tensor, vocab_size: int) -> None:
    """Clears the bits of one mask that stand for no token, in place."""
    used = vocab_size % _WORD
    if used:
        mask[-1] &= (1 << used) - 1


def forbid(mask: torch.Tensor, tokens: Iterable[int]) -> None:
    """Clears the bits of tokens in one mask, in place."""
    for token in tokens:
        shift = token % _WORD
        # The highest bit is the sign.
        bit = 1 << shift if shift < _WORD - 1 else -(1 << shift)
        mask[token // _WORD] &= ~bit


def fill_masks(
    sources: Sequence[FillsMask], banned: Sequence[frozenset[int]], vocab_size: int
) -> torch.Tensor:
    """Masks of several sequences: int32 [n, ceil(vocab / 32)] on the CPU.

    A sequence that has no continuation gets a mask that allows everything: a row without any
    finite logit could not be sampled. Its source refuses what comes of it.
    """
    words = torch.zeros(len(sources), mask_words(vocab_size), dtype=torch.int32)
    for row, source, unwanted in zip(words, sources, banned, strict=True):
        source.fill(row, unwanted)
        if not row.any():
            row.fill_(-1)
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
    bits = (upload(words.numpy(), torch.int32, device).unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[-1]] == 0
    index = upload(rows, torch.int64, device)
    logits.index_copy_(0, index, logits[index].masked_fill_(forbidden, -torch.inf))
