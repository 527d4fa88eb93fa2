"""Draws the tokens of a step, and records log-probabilities where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_minima.messages import LogProbs
from sglang_minima.runner.sampling import NO_TOKEN, log_probs_of, sample
from sglang_minima.scheduler.request import Request

_LOGIT_ROWS = 256
"""Prompt rows whose logits exist at once when prompt log-probabilities are asked for."""


def draw_tokens(requests: Sequence[Request], logits: torch.Tensor) -> list[int]:
    """Samples the next token of each request and stores its log-probability if that is asked for.

    Args:
        requests: one per row.
        logits: float32 [rows, vocab].

    Returns:
        Token ids, or `NO_TOKEN`, one a row.
    """
    tokens = sample(logits, [request.row for request in requests])
    for row, request in enumerate(requests):
        message = request.message
        if not message.return_logprob or tokens[row] == NO_TOKEN:
            continue
        fresh = log_probs_of(
            logits[row : row + 1],
            [tokens[row]],
            message.top_logprobs_num,
            message.token_ids_logprob,
        )
        request.unsent_logprobs = _join(request.unsent_logprobs, fresh)
    return tokens


def record_prompt_rows(
    request: Request,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    start: int,
    hidden: torch.Tensor,
) -> None:
    """Stores the log-probabilities of prompt tokens, in pieces of bounded size.

    Args:
        request: its prompt is in prefill.
        logits_of: hidden states [n, hidden] to float32 [n, vocab].
        start: prompt position of the first row.
        hidden: [rows, hidden]; row i predicts token start + i + 1.
    """
    wanted = request.next_input_logprob
    if wanted is None:
        return
    # The last row of a prompt predicts the output (that of a single token still has an entry).
    end = min(len(hidden), max(request.prompt_len - 1 - start, 1))
    for offset in range(max(wanted - 1 - start, 0), end, _LOGIT_ROWS):
        logits = logits_of(hidden[offset : min(offset + _LOGIT_ROWS, end)])
        record_input_logprobs(request, start + offset, logits)


def record_input_logprobs(request: Request, start: int, logits: torch.Tensor) -> None:
    """Stores the log-probabilities of prompt tokens start+1 ... that follow the given rows.

    Args:
        request: its prompt is in prefill.
        start: prompt position of the first row.
        logits: float32 [rows, vocab]; row i predicts token start + i + 1.
    """
    message = request.message
    first = max(message.logprob_start_len, 0)
    if request.input_logprobs is None:
        request.input_logprobs = LogProbs(
            [], [] if message.top_logprobs_num else None, [] if message.token_ids_logprob else None
        )
        if first == 0:
            # Nothing precedes the first token of a prompt.
            request.input_logprobs = _join(
                request.input_logprobs, LogProbs([(None, request.tokens[0])], [None], [None])
            )
    done = first + len(request.input_logprobs.tokens)
    stop = min(start + len(logits) + 1, request.prompt_len)
    if done >= stop:
        return
    rows = logits[done - 1 - start : stop - 1 - start]
    fresh = log_probs_of(
        rows,
        list(request.tokens[done:stop]),
        message.top_logprobs_num,
        message.token_ids_logprob,
    )
    request.input_logprobs = _join(request.input_logprobs, fresh)


def _join(old: LogProbs | None, new: LogProbs) -> LogProbs:
    if old is None:
        return new
    return LogProbs(
        old.tokens + new.tokens,
        None if old.top is None else old.top + (new.top or []),
        None if old.chosen is None else old.chosen + (new.chosen or []),
    )
