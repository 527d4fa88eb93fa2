"""Decides after every sampled token whether a sequence ends, and why."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import regex

from sglang_minima.messages import FinishReason
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.tokenization.incremental import IncrementalDecoder
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sglang_minima.grammar.constraint import Constraint

_REGEX_WINDOW = 4096
"""Characters of output a stop pattern is searched in (the latest)."""
_REGEX_TIMEOUT = 0.05
"""Seconds one search may take before the request is ended: a pattern must not stall the batch."""


class StopMatcher:
    """Stop conditions of one sequence; text is decoded only when a string or pattern needs it."""

    def __init__(
        self, sampling: SamplingParams, eos_ids: frozenset[int], tokenizer: Tokenizer | None
    ) -> None:
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else eos_ids
        )
        self._patterns = [regex.compile(pattern) for pattern in sampling.stop_regex]
        self._decoder: IncrementalDecoder | None = None
        self._tokenizer = tokenizer
        self._text = ""
        self._early = 0
        """Leading characters of `_text` that were written before min_new_tokens."""
        self._longest = max((len(text) for text in sampling.stop), default=0)
        self._answer = None if sampling.until_calls is None else sampling.until_calls.parser()
        self._reads_text = tokenizer is not None and bool(
            sampling.stop or self._patterns or self._answer
        )
        self.constraint: Constraint | None = None
        """The grammar that the sequence follows."""
        self._min_new_tokens = sampling.min_new_tokens
        self._max_new_tokens = sampling.max_new_tokens

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end the sequence (masked until min_new_tokens)."""
        return self._stop_ids

    def check(self, tokens: array[int], prompt_len: int) -> FinishReason | None:
        """Looks at the token sampled last.

        Args:
            tokens: prompt and output ids; the last one is new.
            prompt_len: number of prompt ids.
        """
        produced = len(tokens) - prompt_len
        token = tokens[-1]
        settled = produced >= self._min_new_tokens
        if token in self._stop_ids and settled:
            return FinishReason("stop", token)
        if self._reads_text:
            matched = self._match_text(tokens, prompt_len, settled)
            if matched is not None:
                return matched
        if self.constraint is not None:
            ended = self._follow(self.constraint, token)
            if ended is not None:
                return ended
        if produced >= self._max_new_tokens:
            return FinishReason("length", self._max_new_tokens)
        return None

    def _follow(self, constraint: Constraint, token: int) -> FinishReason | None:
        """Moves the grammar on. Where it is complete the sequence ends also if EOS is ignored:
        nothing may follow."""
        if token in constraint.stop_ids:
            return FinishReason("stop", token)
        problem = constraint.accept(token)
        return None if problem is None else FinishReason("abort", message=problem, status_code=400)

    def _match_text(
        self, tokens: array[int], prompt_len: int, settled: bool
    ) -> FinishReason | None:
        if self._decoder is None:
            assert self._tokenizer is not None
            self._decoder = IncrementalDecoder(
                self._tokenizer,
                list(tokens[max(0, prompt_len - 6) : prompt_len]),
                self._sampling.skip_special_tokens,
                self._sampling.spaces_between_special_tokens,
            )
        delta = self._decoder.push([tokens[-1]])
        if self._answer is not None:
            self._answer.push(delta)
        text = self._text + delta
        self._text = text[-max(_REGEX_WINDOW, 2 * self._longest) :]
        self._early = max(self._early - len(text) + len(self._text), 0)
        if not settled:
            self._early = len(self._text)
        if not settled or not delta:
            return None
        # A match must touch the new text; older text was searched when it was new, or came before
        # the minimum: what is complete by then ends nothing, or the minimum would be none.
        tail = self._text[-(len(delta) + self._longest) :]
        for stop in self._sampling.stop:
            if stop in tail:
                return FinishReason("stop", stop)
        if self._answer is not None and self._answer.full:
            return FinishReason("stop")
        for pattern in self._patterns:
            try:
                matches = pattern.finditer(self._text, timeout=_REGEX_TIMEOUT)
                # A pattern such as a* also matches nothing, which stops nobody.
                found = next(
                    (match[0] for match in matches if match[0] and match.end() > self._early), None
                )
            except TimeoutError:
                return FinishReason(
                    "abort", message="stop_regex takes too long to search", status_code=400
                )
            if found is not None:
                return FinishReason("stop", found)
        return None
