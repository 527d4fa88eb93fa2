"""The tokenizer manager: checks and tokenises requests, sends them, and routes the answers back."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import msgspec

from sglang_minima.channels import Addresses, AsyncReceiver, Sender
from sglang_minima.grammar.checker import GrammarChecker
from sglang_minima.grammar.failed import AMBIGUOUS
from sglang_minima.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    TextBatch,
    ToFrontend,
    ToScheduler,
)
from sglang_minima.sampling_params import InvalidRequest, SamplingParams
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.inputs import (
    Bounds,
    PromptInput,
    check_token_ids,
    prompt_too_long,
    too_many_sequences,
)
from sglang_minima.tokenization.state import (
    EngineDead,
    Generation,
    RequestObserver,
    RequestState,
)
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

QUEUE_FULL = "The request queue is full."
_THREAD_CHARACTERS = 4096
"""Shorter texts are tokenised in the event loop: that takes less than a thread switch is worth."""
_PROBE_CHARACTERS_PER_TOKEN = 32
"""A text longer than the context by this factor is judged by its beginning first."""


class QueueFull(RuntimeError):
    """Too many requests wait (503)."""


@dataclass(frozen=True)
class ModelLimits:
    """What the manager must know of the model."""

    vocab_size: int
    context_length: int
    max_total_tokens: int

    @property
    def longest_sequence(self) -> int:
        """Tokens that one sequence may have: the context, or what of it the arena holds."""
        return min(self.context_length, self.max_total_tokens)

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> ModelLimits:
        """From what the scheduler reports when it is ready."""
        return cls(info["vocab_size"], info["context_length"], info["max_total_num_tokens"])


class TokenizerManager:
    """One per server; lives in one event loop.

    Args:
        args: the server's settings.
        limits: of the loaded model.
        tokenizer: of the loaded model.
        addresses: where the other processes listen; binds `addresses.frontend`.
        observers: told about requests and outputs, for metrics and the request log.
    """

    def __init__(
        self,
        args: ServerArgs,
        limits: ModelLimits,
        tokenizer: Tokenizer,
        addresses: Addresses,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.dead: str | None = None
        self._capacity = args.max_queued_requests + args.max_running_requests
        self._observers = tuple(observers)
        self._sender = Sender(addresses.scheduler)
        self._receiver: AsyncReceiver[ToFrontend] = AsyncReceiver(addresses.frontend, ToFrontend)
        self._running: dict[str, tuple[RequestState, Generation]] = {}
        self._controls: dict[str, asyncio.Future[ControlReply]] = {}
        self._grammars = GrammarChecker(tokenizer.hugging_face.name_or_path)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._task = asyncio.get_running_loop().create_task(self._receive())
        self._task.add_done_callback(self._receiver_ended)

    @property
    def bounds(self) -> Bounds:
        """What a call cannot exceed."""
        return Bounds(self._capacity, self.limits.context_length)

    @property
    def num_running(self) -> int:
        """Sequences sent to the scheduler that have not finished."""
        return len(self._running)

    def states(self, limit: int) -> list[RequestState]:
        """Up to `limit` of these sequences, those that came first."""
        return [state for state, _ in islice(self._running.values(), limit)]

    async def submit(self, prompts: list[PromptInput], group: str | None = None) -> Generation:
        """Sends the prompts of one call to the scheduler.

        Args:
            prompts: each is fanned out to its `sampling.n` samples.
            group: the rid that a client gave to the whole batch.

        Raises:
            InvalidRequest: a prompt cannot be served as it stands.
            QueueFull: too many requests wait.
            GrammarBusy: its grammar cannot be compiled now.
            EngineDead: the server lost a process.
        """
        total = sum(prompt.sampling.n for prompt in prompts)
        self._check_room(total)
        for prompt in prompts:
            if prompt.token_ids_logprob:
                check_token_ids(
                    prompt.token_ids_logprob, self.limits.vocab_size, "token_ids_logprob"
                )
        grammars = [prompt.sampling.grammar for prompt in prompts]
        await self._grammars.check(grammar for grammar in grammars if grammar is not None)
        prompt_ids = await self.in_thread(
            sum(len(prompt.prompt) for prompt in prompts),
            lambda: [self._token_ids(prompt.prompt) for prompt in prompts],
        )
        states: list[RequestState] = []
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            states += self._samples(prompt, ids, group)
        self._check_room(total)
        rids = {state.rid for state in states}
        if len(rids) < len(states) or not rids.isdisjoint(self._running):
            raise InvalidRequest("rid must be unique among the running requests")
        generation = Generation(states, self._send_abort)
        for state in states:
            # Sent first: what cannot be sent must not count as running for ever.
            self._send(state.request)
            self._running[state.rid] = (state, generation)
            for observer in self._observers:
                observer.received(state)
        return generation

    async def in_thread(self, characters: int, work: Callable[[], T]) -> T:
        """Runs tokenizer work: at once when it is short, else without blocking the loop."""
        if characters < _THREAD_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def abort(self, rid: str) -> int:
        """Aborts the request, or the batch, with this rid; returns how many sequences that is."""
        matching = [
            state.rid for state, _ in self._running.values() if rid in (state.rid, state.group)
        ]
        for running in matching:
            self._send_abort(running)
        return len(matching)

    def abort_all(self) -> int:
        """Aborts everything; returns how many sequences that is."""
        for rid in self._running:
            self._send_abort(rid)
        return len(self._running)

    async def control(
        self, method: str, arguments: dict[str, Any] | None = None, timeout: float = 30.0
    ) -> ControlReply:
        """Asks the scheduler something (see `ControlRequest`).

        Raises:
            EngineDead: the server lost a process.
            TimeoutError: no answer in time.
        """
        self._check_alive()
        request = ControlRequest(uuid.uuid4().hex, method, arguments or {})
        future = asyncio.get_running_loop().create_future()
        self._controls[request.id] = future
        self._send(request)
        try:
            return await asyncio.wait_for(future, timeout)
        finally:
            del self._controls[request.id]

    def fail(self, reason: str) -> None:
        """A process has died: everything that waits gets `EngineDead`, now and from now on."""
        if self.dead is not None:
            return
        self.dead = reason
        for _, generation in self._running.values():
            generation.fail(reason)
        self._running.clear()
        for future in self._controls.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

    async def close(self) -> None:
        """Stops receiving and releases the sockets."""
        self.fail("the server is shutting down")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._grammars.close()
        self._receiver.close()
        self._sender.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _receive(self) -> None:
        while True:
            message = await self._receiver.receive()
            if isinstance(message, TextBatch):
                self._distribute(message)
            else:
                future = self._controls.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)

    def _receiver_ended(self, task: asyncio.Task[None]) -> None:
        """Without a receiver everything would wait for ever: it fails instead."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("messages cannot be received any more", exc_info=error)
            self.fail(f"the HTTP process failed ({type(error).__name__})")

    def _distribute(self, batch: TextBatch) -> None:
        for update in batch.outputs:
            found = self._running.get(update.output.rid)
            if found is None:
                logger.debug("output for a request that is not running: %s", update.output.rid)
                continue
            state, generation = found
            state.apply(update)
            if state.finish is not None:
                del self._running[state.rid]
                grammar = state.request.sampling.grammar
                if grammar is not None and state.finish.message == AMBIGUOUS:
                    self._grammars.refuse(grammar, AMBIGUOUS)
            for observer in self._observers:
                observer.progressed(state, len(update.output.new_ids))
                if state.finish is not None:
                    observer.finished(state)
            generation.notify(state.rid)

    def _samples(
        self, prompt: PromptInput, ids: list[int], group: str | None
    ) -> list[RequestState]:
        """The n sequences of one prompt."""
        sampling = self._clip(prompt.sampling, len(ids))
        start = prompt.logprob_start_len
        if prompt.return_logprob and start == -1 and sampling.max_new_tokens == 0:
            # Without output tokens, only the prompt's log-probabilities can be meant.
            start = 0
        if start > len(ids):
            raise InvalidRequest(
                f"logprob_start_len is {start}, but the prompt has {len(ids)} tokens"
            )
        decode_each = self.tokenizer.decode_each if prompt.return_text_in_logprobs else None
        states = []
        for sample in range(sampling.n):
            if prompt.rid is None:
                rid = uuid.uuid4().hex
            else:
                rid = prompt.rid if sampling.n == 1 else f"{prompt.rid}_{sample}"
            request = GenerateRequest(
                rid=rid,
                input_ids=ids,
                sampling=sampling,
                salt=prompt.salt,
                priority=prompt.priority,
                return_logprob=prompt.return_logprob,
                logprob_start_len=start,
                top_logprobs_num=prompt.top_logprobs_num,
                token_ids_logprob=prompt.token_ids_logprob,
                seed_offset=sample,
            )
            states.append(RequestState(request, group or prompt.rid, decode_each))
        return states

    def _clip(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Output limits that fit into the context after the prompt."""
        room = self.limits.context_length - prompt_tokens
        if sampling.max_new_tokens <= room:
            return sampling
        return msgspec.structs.replace(
            sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room)
        )

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        """Tokenises and checks one prompt."""
        if not isinstance(prompt, str):
            check_token_ids(prompt, self.limits.vocab_size, "input_ids")
            ids = prompt
        else:
            self.refuse_overlong(prompt)
            ids = self.tokenizer.encode(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty")
        self._check_length(len(ids))
        return ids

    def refuse_overlong(self, text: str) -> None:
        """Judges a text of many megabytes by its beginning: it must not occupy the tokenizer only
        to be refused.

        Raises:
            InvalidRequest: the beginning alone fills the context.
        """
        probe = self.limits.context_length * _PROBE_CHARACTERS_PER_TOKEN
        if len(text) > 2 * probe:
            seen = len(self.tokenizer.encode(text[:probe]))
            if seen > self.limits.context_length:
                self._check_length(seen, "at least ")

    def _check_length(self, tokens: int, precision: str = "") -> None:
        if tokens >= self.limits.context_length:
            raise InvalidRequest(
                prompt_too_long(f"{precision}{tokens}", self.limits.context_length)
            )
        if tokens > self.limits.max_total_tokens:
            raise InvalidRequest(
                f"the prompt has {tokens} tokens, but the KV arena holds "
                f"{self.limits.max_total_tokens} tokens"
            )

    def _check_room(self, count: int) -> None:
        self._check_alive()
        if count > self._capacity:
            raise InvalidRequest(too_many_sequences(count, self._capacity))
        if len(self._running) + count > self._capacity:
            raise QueueFull(QUEUE_FULL)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)

    def _send_abort(self, rid: str) -> None:
        if self.dead is None:
            self._send(AbortRequest(rid))

    def _send(self, message: ToScheduler) -> None:
        self._sender.send(message)
