"""`IncrementalDecoder`: text of a growing token sequence, piece by piece, in constant time each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD = 3
"""A character has at most 4 bytes, so at most 3 trailing U+FFFD can still become a character."""
_WINDOW = 24
"""Tokens decoded again at most, while the text is complete."""
_HARD_WINDOW = 64
"""... and while it is not: a model may emit invalid bytes for ever."""
_CONTEXT = 6
"""Tokens kept when the window is cut; some decoders treat the first token differently."""


class Decodes(Protocol):
    """The part of `Tokenizer` that is used here."""

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str: ...


class IncrementalDecoder:
    """Turns the new tokens of one sequence into new text.

    The pieces, joined, are `decode(prompt_tail + ids)` without the prompt's text. A character whose
    bytes have not all arrived is held back, so no piece has half of one; bytes that never become
    a character appear as U+FFFD, as in `decode`. (The one difference: tokenizers with byte
    fallback replace a whole run of byte tokens when any of it is invalid; here what was already
    sent stays sent.) The text depends on the tokens only, not on how they are split into pushes.
    A token costs one decoding of a bounded window.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        prompt_tail: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            tokenizer: decodes windows of ids.
            prompt_tail: the last few prompt ids, so that the first new token is decoded in context.
            skip_special_tokens, spaces_between_special_tokens: as in `Tokenizer.decode`.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._window = prompt_tail[-_CONTEXT:]
        self._text = self._decode(self._window)
        self._prompt_text = self._text
        self._sent = len(self._text) - _held(self._text)
        """Characters of `_text` that were returned (or belong to the prompt)."""

    def push(self, ids: Iterable[int]) -> str:
        """Appends tokens; returns the text that became complete."""
        return "".join([self._step(token) for token in ids])

    def flush(self) -> str:
        """Ends the sequence; returns the text held back (U+FFFD where bytes are missing)."""
        return self._take(len(self._text))

    def _step(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        held = _held(text)
        if text == self._text and text and not held:
            # An invisible token (special, unknown) after visible text: no context for anything.
            self._window.pop()
            return ""
        self._text = text
        piece = self._take(len(text) - held)
        if len(self._window) > (_HARD_WINDOW if held else _WINDOW):
            piece += self._cut(held)
        return piece

    def _take(self, end: int) -> str:
        """Text from what was sent up to `end`."""
        if end <= self._sent:
            return ""
        start = self._sent
        if self._prompt_text:
            # U+FFFD at the end of the prompt was not sent, as it could have become a character.
            # It did not if the prompt's text is still there unchanged: then it is the prompt's.
            if self._text.startswith(self._prompt_text):
                start = max(start, len(self._prompt_text))
            self._prompt_text = ""
        self._sent = end
        return self._text[start:end]

    def _cut(self, held: int) -> str:
        """Shortens the window; returns held text that the shorter window no longer shows."""
        window = self._window[-_CONTEXT:]
        text = self._decode(window)
        lost = ""
        if held and _held(text) != held:
            lost = self._take(len(self._text))
            held = 0
        self._window, self._text, self._sent = window, text, len(text) - held
        return lost

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special, self._spaces)


def _held(text: str) -> int:
    """How many characters at the end may still change: the trailing U+FFFD, up to 3."""
    if not text.endswith(_REPLACEMENT):
        return 0
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_HELD)
