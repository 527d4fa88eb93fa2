"""What leaves the scheduler: takes sampled tokens, ends sequences, sends messages about both."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.messages import FinishReason, TokenOutput
from sglang_minima.runner.sampling import NO_TOKEN
from sglang_minima.scheduler.queues import Queues
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.statistics import Statistics

_PROMPT_TAIL = 6
"""Prompt ids that incremental decoding needs to see how the first new text joins on."""

_copy: Callable[[TokenOutput], TokenOutput] = TokenOutput.__copy__  # type: ignore[attr-defined]
"""Every struct has it, unknown to the type stubs; `copy.copy` takes twice the time to find it."""


class Outputs:
    """Adds tokens to sequences and ends them, by themselves or from outside.

    Args:
        most_tokens: a sequence of so many ends, prompt included.
        send: takes messages to the detokenizer.
    """

    def __init__(
        self,
        cache: PrefixCache,
        queues: Queues,
        statistics: Statistics,
        most_tokens: int,
        send: Callable[[list[TokenOutput]], None],
    ) -> None:
        self._cache = cache
        self._queues = queues
        self._statistics = statistics
        self._most_tokens = most_tokens
        self._send = send

    def take(self, sampled: list[tuple[Request, int]]) -> None:
        """Adds the token sampled for each request, ends those that it ends, and sends."""
        now = time.time()
        outputs: list[TokenOutput] = []
        for request, token in sampled:
            if token == NO_TOKEN:
                self.fail(request, "the model computed values that are no numbers", 500)
                continue
            self._statistics.generated += 1
            request.tokens.append(token)
            request.unsent.append(token)
            if not request.prefilled:
                request.prefilled = True
                request.first_token_time = request.first_token_time or now
            reason = request.stop.check(request.tokens, request.prompt_len)
            if reason is None and len(request.tokens) >= self._most_tokens:
                reason = FinishReason("length", request.output_len)
            if reason is not None:
                self._finish(request, reason)
                outputs.append(take_output(request, reason))
            elif len(request.unsent) >= request.interval or request.reply is None:
                outputs.append(take_output(request, None))
        if outputs:
            self._send(outputs)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request at once, wherever it is, and says so."""
        self._finish(request, reason)
        self._send([take_output(request, reason)])

    def fail(self, request: Request, message: str, status: int = 507) -> None:
        """Ends a request that cannot go on, with a sentence and the status of its reply."""
        self.end(request, FinishReason("abort", message=message, status_code=status))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The one way out: queues, pages and tables forget the request."""
        request.finish = reason
        self._queues.remove(request)
        if request.table is not None:
            self._cache.release(request)
        self._statistics.finished(request)


def take_output(request: Request, finish: FinishReason | None) -> TokenOutput:
    """The message with everything of a request that has not been sent yet; marks it sent."""
    reply = request.reply
    if reply is None:
        reply = request.reply = _common_part(request)
        output = _copy(reply)
        output.input_logprobs = request.input_logprobs
        output.prompt_tail = list(request.tokens[: request.prompt_len][-_PROMPT_TAIL:])
        output.stop = request.message.sampling.stop
    else:
        output = _copy(reply)
    output.new_ids = request.unsent
    output.completion_tokens = len(request.tokens) - request.prompt_len
    output.preemptions = request.preemptions
    output.finish = finish
    output.output_logprobs = request.unsent_logprobs
    request.unsent = []
    request.unsent_logprobs = None
    return output


def _common_part(request: Request) -> TokenOutput:
    """What all messages of a request say alike: building it for each would cost more than all
    else that is done for a token."""
    sampling = request.message.sampling
    return TokenOutput(
        rid=request.rid,
        new_ids=[],
        finish=None,
        prompt_tokens=request.prompt_len,
        completion_tokens=0,
        cached_tokens=request.cached_tokens,
        cached_by_tier=request.cached_by_tier,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        no_stop_trim=sampling.no_stop_trim,
        first_token_time=request.first_token_time,
        queue_seconds=request.queue_seconds,
        prefill_seconds=_prefill_seconds(request),
    )


def _prefill_seconds(request: Request) -> float | None:
    if request.queue_seconds is None or not request.first_token_time:
        return None
    return request.first_token_time - request.arrival - request.queue_seconds
