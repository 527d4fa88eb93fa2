"""Replies and stream chunks of the OpenAI routes, made from request states."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_minima.entrypoints.openai_types import CommonBody
from sglang_minima.entrypoints.replies import abort_error
from sglang_minima.tokenization.state import RequestState, Triple

TokenBytes = Callable[[int], bytes]


@dataclass
class Envelope:
    """What every reply or chunk of one call carries."""

    id: str
    model: str
    kind: str
    """The `object` of the reply."""
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A reply, or a chunk, with these choices."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class UsagePolicy:
    """Which chunks of a stream carry token counts."""

    def __init__(self, body: CommonBody) -> None:
        options = body.stream_options
        self.at_end = options is not None and bool(options.include_usage)
        self._always = options is not None and bool(options.continuous_usage_stats)

    def add_to(
        self,
        chunk: dict[str, Any],
        state: RequestState,
        reasoning_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        """Adds the `usage` field of a chunk that is not the last."""
        if self._always:
            chunk["usage"] = usage([state], reasoning_tokens())
        elif self.at_end:
            chunk["usage"] = None


def usage(states: Sequence[RequestState], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Token counts of a call; a prompt counts once, however many samples it has."""
    first_samples = [state for state in states if state.request.seed_offset == 0]
    prompt = sum(state.prompt_tokens for state in first_samples)
    cached = sum(state.cached_tokens for state in first_samples)
    by_tier: Counter[str] = Counter()
    for state in first_samples:
        by_tier.update(state.cached_by_tier)
    completion = sum(state.completion_tokens for state in states)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cached_tokens_by_tier": dict(by_tier),
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "reasoning_tokens": reasoning_tokens,
    }


def raise_if_refused(state: RequestState) -> None:
    """Raises the HTTP error of a sequence that the scheduler refused."""
    error = abort_error(state.finish)
    if error is not None:
        raise error


def finish_fields(state: RequestState) -> dict[str, Any]:
    """`finish_reason` and `matched_stop` of a choice; null while it runs."""
    finish = state.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    matched = finish.matched if finish.type == "stop" else None
    return {"finish_reason": finish.type, "matched_stop": matched}


def completion_logprobs(
    tokens: list[Triple], top: list[list[Triple] | None], offset: int
) -> dict[str, Any]:
    """The `logprobs` object of a text completion; `offset` is where its text begins."""
    texts = [text for _, _, text in tokens]
    rows = top or [[] for _ in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [value for value, _, _ in tokens],
        "text_offset": offsets,
        "top_logprobs": [
            None if row is None or token[0] is None else _by_text(row, token)
            for row, token in zip(rows, tokens, strict=True)
        ],
    }


def _by_text(row: list[Triple], chosen: Triple) -> dict[str, float | None]:
    """The likeliest tokens, and the chosen one behind them if it is none of them."""
    found = {text: value for value, _, text in row}
    found.setdefault(chosen[2], chosen[0])
    return found


def chat_logprobs(
    tokens: list[Triple], top: list[list[Triple] | None], token_bytes: TokenBytes
) -> dict[str, Any]:
    """The `logprobs` object of a chat completion."""

    def entry(triple: Triple) -> dict[str, Any]:
        value, token, text = triple
        return {"token": text, "logprob": value, "bytes": list(token_bytes(token))}

    rows = top or [None] * len(tokens)
    return {
        "content": [
            {**entry(token), "top_logprobs": [entry(other) for other in row or []]}
            for token, row in zip(tokens, rows, strict=True)
        ],
        "refusal": None,
    }
