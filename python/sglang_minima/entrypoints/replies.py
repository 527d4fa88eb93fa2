"""Native replies made from request states; the same for HTTP and for the offline `Engine`."""

from __future__ import annotations

from typing import Any

from sglang_minima.entrypoints.errors import HttpError
from sglang_minima.messages import FinishReason
from sglang_minima.tokenization.state import RequestState

WEIGHT_VERSION = "default"


def finish_reason(state: RequestState) -> dict[str, Any] | None:
    """The `finish_reason` object, None while the sequence runs."""
    finish = state.finish
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": state.completion_tokens}
    return {
        "type": "abort",
        "message": finish.message,
        "status_code": finish.status_code or None,
        "err_type": None,
    }


def abort_error(finish: FinishReason | None) -> HttpError | None:
    """The HTTP error of a sequence that the scheduler refused; None for any other end."""
    if finish is None or finish.type != "abort" or finish.status_code == 0:
        return None
    return HttpError(finish.status_code, finish.message or "the request was aborted")


def meta_info(state: RequestState) -> dict[str, Any]:
    """The `meta_info` object; log-probabilities are [value, token id, text or null] triples."""
    request = state.request
    meta: dict[str, Any] = {
        "id": state.rid,
        "finish_reason": finish_reason(state),
        "prompt_tokens": state.prompt_tokens,
        "completion_tokens": state.completion_tokens,
        "cached_tokens": state.cached_tokens,
        "cached_tokens_by_tier": state.cached_by_tier,
        "reasoning_tokens": 0,
        "weight_version": WEIGHT_VERSION,
        "num_retractions": state.preemptions,
    }
    if state.finish is not None:
        meta["e2e_latency"] = state.latency
    if request.return_logprob:
        given, made = state.input_logprobs, state.output_logprobs
        meta["input_token_logprobs"] = list(given.tokens)
        meta["output_token_logprobs"] = list(made.tokens)
        meta["output_token_logprobs_length"] = len(made.tokens)
        if request.top_logprobs_num > 0:
            meta["input_top_logprobs"] = list(given.top)
            meta["output_top_logprobs"] = list(made.top)
        if request.token_ids_logprob:
            meta["input_token_ids_logprobs"] = list(given.chosen)
            meta["output_token_ids_logprobs"] = list(made.chosen)
    return meta


def native_reply(state: RequestState) -> dict[str, Any]:
    """One object of `/generate`: cumulative text and ids, and `meta_info`."""
    return {
        "text": state.text,
        "output_ids": list(state.output_ids),
        "meta_info": meta_info(state),
    }
