"""The tokenizer manager: sends the requests of calls, and routes the answers back."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from itertools import islice
from typing import Any

from sglang_minima.channels import Addresses, AsyncReceiver, Sender
from sglang_minima.grammar.checker import GrammarChecker
from sglang_minima.grammar.failed import AMBIGUOUS
from sglang_minima.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    TextBatch,
    ToFrontend,
    ToScheduler,
)
from sglang_minima.sampling_params import InvalidRequest
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.inputs import (
    Bounds,
    PromptInput,
    too_many_sequences,
)
from sglang_minima.tokenization.prompts import ModelLimits, Prompts
from sglang_minima.tokenization.state import (
    EngineDead,
    Generation,
    RequestObserver,
    RequestState,
)
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

QUEUE_FULL = "The request queue is full."


class QueueFull(RuntimeError):
    """Too many requests wait (503)."""


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
        self.prompts = Prompts(limits, tokenizer)
        self.dead: str | None = None
        self._capacity = args.max_queued_requests + args.max_running_requests
        self._observers = tuple(observers)
        self._sender = Sender(addresses.scheduler)
        self._receiver: AsyncReceiver[ToFrontend] = AsyncReceiver(addresses.frontend, ToFrontend)
        self._running: dict[str, tuple[RequestState, Generation]] = {}
        self._controls: dict[str, asyncio.Future[ControlReply]] = {}
        self._grammars = GrammarChecker(tokenizer.hugging_face.name_or_path)
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
        self.prompts.check(prompts)
        grammars = [prompt.sampling.grammar for prompt in prompts]
        await self._grammars.check(grammar for grammar in grammars if grammar is not None)
        prompt_ids = await self.prompts.tokenize(prompts)
        states: list[RequestState] = []
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            states += self.prompts.samples(prompt, ids, group)
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
        self.prompts.close()

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
