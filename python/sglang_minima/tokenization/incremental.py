"""`IncrementalDecoder`: text of a growing token sequence, piece by piece, in constant time each."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

_REPLACEMENT = "\ufffd"
_WINDOW = 24
"""Tokens decoded again at most, while the text is complete."""
_HARD_WINDOW = 64
"""... and while it ends inside a character: a model may emit invalid bytes for ever."""
_CONTEXT = 6
"""Tokens kept when the window is cut: more than a character has bytes."""


class Decodes(Protocol):
    """The part of `Tokenizer` that is used here."""

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of token ids."""
        ...

    def byte_value(self, token: int) -> int | None:
        """The byte that a byte-fallback token stands for; None for all other tokens."""
        ...


class IncrementalDecoder:
    """Turns the new tokens of one sequence into new text.

    The pieces, joined, are `decode(prompt_tail + ids)` without the prompt's text. A character whose
    bytes have not all arrived is held back, so no piece has half of one; bytes that never become
    a character appear as U+FFFD. The text depends on the tokens only, not on how they are split
    into pushes, and a token costs one decoding of a bounded window.

    One difference to `decode`: where byte-fallback tokens (sentencepiece) are not UTF-8, `decode`
    replaces the whole run of byte tokens; here only the invalid bytes are replaced, because the
    valid ones were sent before.
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
        # Ordinary tokens are decoded in a window, because the first token of a text may decode
        # differently (sentencepiece drops its space); `_sent` characters of its text are out.
        self._window: list[int] = []
        self._text = ""
        self._sent = 0
        # Byte-fallback tokens are decoded here: decoders of whole texts answer with U+FFFD for
        # complete characters while the next one is incomplete.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: list[int] = []
        self._drop_replacement = False
        self.push(prompt_tail)
        # The prompt may end inside a character. If the new tokens complete it, it is theirs; if
        # not, its U+FFFD is the prompt's.
        self._drop_replacement = bool(self._run) or self._sent < len(self._text)

    def push(self, ids: Iterable[int]) -> str:
        """Appends tokens; returns the text that became complete."""
        return self._without_prompt("".join([self._step(token) for token in ids]))

    def flush(self) -> str:
        """Ends the sequence; returns the text held back (U+FFFD where bytes are missing)."""
        return self._without_prompt(self._take(len(self._text)) + self._end_run())

    def _without_prompt(self, piece: str) -> str:
        if piece and self._drop_replacement:
            self._drop_replacement = False
            return piece.removeprefix(_REPLACEMENT)
        return piece

    def _step(self, token: int) -> str:
        byte = self._tokenizer.byte_value(token)
        if byte is not None:
            return self._byte(token, byte)
        before = self._end_run()
        self._window.append(token)
        text = self._decode(self._window)
        held = text.endswith(_REPLACEMENT)
        if text == self._text and text and not held:
            # An invisible token (special, unknown) after visible text: no context for anything.
            self._window.pop()
            return before
        self._text = text
        piece = self._take(len(text) - held)
        if len(self._window) > (_HARD_WINDOW if held else _WINDOW):
            piece += self._cut(held)
        return before + piece

    def _byte(self, token: int, byte: int) -> str:
        before = self._take(len(self._text))
        self._run.append(token)
        piece = self._utf8.decode(bytes([byte]))
        complete = len(self._run) - len(self._utf8.getstate()[0])
        if piece and _REPLACEMENT not in piece:
            self._window, self._text, self._sent = self._run[:complete], piece, len(piece)
        self._run = self._run[complete:]
        return before + piece

    def _end_run(self) -> str:
        """Ends a run of byte tokens; returns U+FFFD for bytes that stayed incomplete."""
        self._run = []
        return self._utf8.decode(b"", final=True)

    def _take(self, end: int) -> str:
        """The window's text from what was sent up to `end`."""
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _cut(self, held: bool) -> str:
        """Shortens the window; returns held text that the shorter window no longer shows."""
        window = self._window[-_CONTEXT:]
        text = self._decode(window)
        lost = ""
        if held and not text.endswith(_REPLACEMENT):
            lost, held = self._take(len(self._text)), False
        self._window, self._text, self._sent = window, text, len(text) - held
        return lost

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special, self._spaces)
