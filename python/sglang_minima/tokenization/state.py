"""State of running requests in the HTTP process: what has been received, and who waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from sglang_minima.messages import FinishReason, GenerateRequest, LogProbs, TextOutput

Triple = list[Any]
"""[log-probability or None, token id, token text or None]"""


class EngineDead(RuntimeError):
    """A process of the server died; nothing can be served any more (503)."""


class RequestObserver(Protocol):
    """Told about the progress of requests (metrics, request log)."""

    def received(self, state: RequestState) -> None: ...

    def progressed(self, state: RequestState, new_tokens: int) -> None: ...

    def finished(self, state: RequestState) -> None: ...


class RequestState:
    """Everything received so far for one sequence.

    Args:
        request: what was sent to the scheduler.
        group: the rid that the client gave to the whole batch, if any.
        decode_each: token ids -> texts, when log-probabilities carry the tokens' texts.
    """

    def __init__(
        self,
        request: GenerateRequest,
        group: str | None,
        decode_each: Callable[[list[int]], list[str]] | None,
    ) -> None:
        self.request = request
        self.rid = request.rid
        self.group = group
        self.text = ""
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.prompt_tokens = len(request.input_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.cached_by_tier: dict[str, int] = {}
        self.preemptions = 0
        self.queue_seconds: float | None = None
        """Time the sequence waited in the scheduler before its first admission."""
        self.prefill_seconds: float | None = None
        """Time from there to its first token."""
        self.input_logprobs = TokenLogProbs()
        self.output_logprobs = TokenLogProbs()
        self.created = time.monotonic()
        self.first_token: float | None = None
        self.updated = self.created
        self.interval = 0.0
        """Seconds between the two latest outputs."""
        self._decode_each = decode_each

    def apply(self, update: TextOutput) -> None:
        """Adds one output of the scheduler and its text."""
        output = update.output
        now = time.monotonic()
        self.interval = now - self.updated
        self.updated = now
        if self.first_token is None and output.new_ids:
            self.first_token = now
        if update.trim:
            self.text = self.text[: len(self.text) - update.trim]
        self.text += update.text
        self.output_ids += output.new_ids
        self.finish = output.finish
        self.prompt_tokens = output.prompt_tokens
        self.completion_tokens = output.completion_tokens
        self.cached_tokens = output.cached_tokens
        self.cached_by_tier = output.cached_by_tier
        self.preemptions = output.preemptions
        self.queue_seconds = output.queue_seconds
        self.prefill_seconds = output.prefill_seconds
        if output.input_logprobs is not None:
            self.input_logprobs.add(output.input_logprobs, self._decode_each)
        if output.output_logprobs is not None:
            self.output_logprobs.add(output.output_logprobs, self._decode_each)

    @property
    def latency(self) -> float:
        """Seconds from arrival to the latest output."""
        return self.updated - self.created


class TokenLogProbs:
    """Log-probabilities of consecutive tokens in the shape of the HTTP interface."""

    def __init__(self) -> None:
        self.tokens: list[Triple] = []
        self.top: list[list[Triple] | None] = []
        self.chosen: list[list[Triple] | None] = []

    def add(self, more: LogProbs, decode_each: Callable[[list[int]], list[str]] | None) -> None:
        self.tokens += _triples(more.tokens, decode_each)
        for rows, target in ((more.top, self.top), (more.chosen, self.chosen)):
            target += [None if row is None else _triples(row, decode_each) for row in rows or []]


def _triples(pairs: Any, decode_each: Callable[[list[int]], list[str]] | None) -> list[Triple]:
    texts: list[str] | list[None]
    if decode_each is None:
        texts = [None] * len(pairs)
    else:
        texts = decode_each([token for _, token in pairs])
    return [[value, token, text] for (value, token), text in zip(pairs, texts, strict=True)]


class Generation:
    """The sequences of one call, in reply order (samples of a prompt adjacent)."""

    def __init__(self, states: list[RequestState], abort: Callable[[str], None]) -> None:
        self.states = states
        self._abort = abort
        self._index = {state.rid: index for index, state in enumerate(states)}
        self._dirty: dict[int, None] = {}
        self._unfinished = len(states)
        self._news = asyncio.Event()
        self._done = asyncio.Event()
        self._error: str | None = None

    def notify(self, rid: str) -> None:
        """New output has been applied to the state of `rid`."""
        index = self._index[rid]
        self._dirty[index] = None
        self._news.set()
        if self.states[index].finish is not None:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._done.set()

    def fail(self, reason: str) -> None:
        """No more output will come."""
        self._error = reason
        self._news.set()
        self._done.set()

    async def wait(self) -> list[RequestState]:
        """Waits until every sequence has finished.

        Raises:
            EngineDead: the server lost a process.
        """
        await self._done.wait()
        if self._unfinished:
            raise EngineDead(self._error)
        return self.states

    async def updates(self) -> AsyncIterator[int]:
        """Indices of sequences with news, until all have finished; news of a slow reader merge.

        Raises:
            EngineDead: the server lost a process.
        """
        open_sequences = len(self.states)
        while open_sequences:
            await self._news.wait()
            self._news.clear()
            dirty, self._dirty = self._dirty, {}
            for index in dirty:
                if self.states[index].finish is not None:
                    open_sequences -= 1
                yield index
            if open_sequences and self._error is not None:
                raise EngineDead(self._error)

    def abort(self) -> None:
        """Stops the sequences that still run; for a client that has gone away."""
        for state in self.states:
            if state.finish is None:
                self._abort(state.rid)
