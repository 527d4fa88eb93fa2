"""Replies and stream chunks of the OpenAI routes, made from request states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_minima.tokenization.state import RequestState, Triple


def usage(states: Sequence[RequestState]) -> dict[str, Any]:
    """Token counts of a call; a prompt counts once, however many samples it has."""
    first_samples = [state for state in states if state.request.seed_offset == 0]
    prompt = sum(state.prompt_tokens for state in first_samples)
    cached = sum(state.cached_tokens for state in first_samples)
    completion = sum(state.completion_tokens for state in states)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "reasoning_tokens": 0,
    }


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
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [value for value, _, _ in tokens],
        "text_offset": offsets,
        "top_logprobs": [
            None if row is None else {text: value for value, _, text in row} for row in top
        ],
    }


def chat_logprobs(tokens: list[Triple], top: list[list[Triple] | None]) -> dict[str, Any]:
    """The `logprobs` object of a chat completion."""
    rows = top or [None] * len(tokens)
    return {
        "content": [
            {**_chat_token(token), "top_logprobs": [_chat_token(other) for other in row or []]}
            for token, row in zip(tokens, rows, strict=True)
        ],
        "refusal": None,
    }


def _chat_token(triple: Triple) -> dict[str, Any]:
    value, _, text = triple
    return {"token": text, "logprob": value, "bytes": list(text.encode())}
