"""The request log: two lines a request, without any prompt text unless that is asked for."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec

from sglang_minima.tokenization.state import RequestState
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger("sglang_minima.requests")

_PARTIAL_CHARACTERS = 2048


class RequestLog:
    """Writes "Receive: {...}" and "Finish: {...}", the objects in JSON.

    Args:
        level: 0: ids, counts and times; 1: sampling parameters too (stop strings and grammars
            among them); 2: prompt and output too, shortened; 3: prompt and output in full.
        tokenizer: gives the prompts back as text.
    """

    def __init__(self, level: int, tokenizer: Tokenizer) -> None:
        self._level = level
        self._tokenizer = tokenizer

    def received(self, state: RequestState) -> None:
        """Logs a request that has been sent to the scheduler."""
        request = state.request
        entry: dict[str, Any] = {"rid": state.rid, "prompt_tokens": state.prompt_tokens}
        if self._level >= 1:
            entry["sampling_params"] = msgspec.to_builtins(request.sampling)
        if self._level >= 2:
            entry["text"] = self._shortened(
                self._tokenizer.decode(request.input_ids, skip_special_tokens=False)
            )
        logger.info("Receive: %s", json.dumps(entry))

    def progressed(self, state: RequestState, new_tokens: int) -> None:
        """Outputs on the way are not logged."""

    def finished(self, state: RequestState) -> None:
        """Logs the end of a request."""
        first = state.first_token
        finish = state.finish
        entry: dict[str, Any] = {
            "rid": state.rid,
            "finish_reason": None if finish is None else finish.type,
            "prompt_tokens": state.prompt_tokens,
            "cached_tokens": state.cached_tokens,
            "completion_tokens": state.completion_tokens,
            "queue_time": _rounded(state.queue_seconds),
            "time_to_first_token": None if first is None else _rounded(first - state.created),
            "e2e_latency": _rounded(state.latency),
        }
        if self._level >= 2:
            entry["text"] = self._shortened(state.text)
        logger.info("Finish: %s", json.dumps(entry))

    def _shortened(self, text: str) -> str:
        if self._level >= 3 or len(text) <= _PARTIAL_CHARACTERS:
            return text
        half = _PARTIAL_CHARACTERS // 2
        return f"{text[:half]} ... {text[-half:]}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
