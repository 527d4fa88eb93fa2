"""The scheduler: one step admits, runs one batch, samples, seals, retiers and sends.

    receive -> match -> admit (memory, budget) -> form one batch (a chunk of extend rows + decode
    rows) -> run -> commit and seal (share) -> sample -> finish -> retier a bounded number of pages

Nothing in a step costs time in proportion to the number of cached prefixes. On a GPU a decode step
runs while the host deals with the tokens of the one before (see `Overlap`).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from minima_radix import Namespace
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.messages import FinishReason, GenerateRequest, TokenOutput
from sglang_minima.runner.batch import Work
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.runner.sampling import NO_TOKEN
from sglang_minima.scheduler.launcher import Launcher, decode_rows
from sglang_minima.scheduler.outputs import draw_tokens, record_prompt_rows, take_output
from sglang_minima.scheduler.overlap import Flight, Overlap
from sglang_minima.scheduler.parked import Parked
from sglang_minima.scheduler.policy import (
    next_chunk,
    next_victim,
    note_overtaking,
    order_waiting,
    prefill_budget,
    twin_ahead,
)
from sglang_minima.scheduler.request import Request, one_slow
from sglang_minima.scheduler.statistics import Statistics
from sglang_minima.scheduler.stopping import StopMatcher
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Scheduled(NamedTuple):
    """What one step runs."""

    works: list[tuple[Request, Work]]
    """Several tokens each."""
    decodes: list[Request]
    """One token each: the first of those pending."""


class Scheduler:
    """Owns the running and waiting requests of one model; driven by `step`."""

    def __init__(
        self,
        args: ServerArgs,
        runner: ModelRunner,
        cache: PrefixCache,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        send: Callable[[list[TokenOutput]], None],
        grammars: GrammarLoader | None = None,
    ) -> None:
        self._args = args
        self._runner = runner
        self._cache = cache
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._send = send
        self._requests: dict[str, Request] = {}
        self._waiting: dict[str, Request] = {}
        self._parked = Parked(grammars)
        self._running: list[Request] = []
        """In order of admission."""
        self._limit = min(runner.context_length, cache.capacity_tokens)
        """Most tokens a sequence may have, prompt included."""
        self._refused_room: int | None = None
        """Tokens of room with which the first of the waiting was refused; None: not known."""
        self._next_holder = 0
        self._max_running = args.max_running_requests
        self._prefill_budget = prefill_budget(args.chunked_prefill_size, runner.device.type)
        self._random = random.Random(args.random_seed)
        self.statistics = Statistics(args.decode_log_interval, runner.device)
        self._launcher = Launcher(cache, runner, self.statistics)
        self._overlap = Overlap(args, cache, self._launcher, self._limit)
        self._flight: Flight | None = None

    # --- requests in and out -------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """True while any request is running or waits for room."""
        return bool(self._running or self._waiting)

    @property
    def busy(self) -> bool:
        """True while `step` has something to do for requests: serving, or a step is in flight,
        maybe of requests that have all been aborted."""
        return self.serving or self._flight is not None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._parked)

    @property
    def compiling(self) -> int:
        """Those of them that wait for their grammar."""
        return len(self._parked)

    @property
    def running_tokens(self) -> int:
        """Tokens whose KV running requests hold."""
        return sum(request.written for request in self._running)

    def add(self, message: GenerateRequest) -> None:
        """Queues a request; what it may ask for was checked before it came here."""
        if message.rid in self._requests:
            raise ValueError(f"request id {message.rid!r} is already in use")
        self._next_holder += 1
        seed = message.sampling.sampling_seed
        base = self._random.getrandbits(63) if seed is None else seed
        request = Request(
            message,
            self._next_holder,
            Namespace(message.salt, message.lora, self._cache.profile.name),
            StopMatcher(message.sampling, self._eos_ids, self._tokenizer),
            base + message.seed_offset,
        )
        self._requests[request.rid] = request
        if message.sampling.grammar is None:
            self._queue(request)
        else:
            self._parked.add(request)
        self.statistics.received += 1

    def _queue(self, request: Request) -> None:
        self._waiting[request.rid] = request
        self._refused_room = None

    def abort(self, rid: str) -> None:
        """Ends a request at once, wherever it is; unknown ids have just finished."""
        request = self._requests.get(rid)
        if request is not None:
            self._finish(request, FinishReason("abort", message="aborted by the client"))
            self._send([take_output(request, request.finish)])

    # --- one step ------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one batch, or takes the tokens of one in flight; False when there was nothing to do,
        not even pages to convert."""
        self._parked.take(self._queue, self._fail)
        if self._flight is not None:
            self._go_on(self._flight)
            return True
        scheduled = self._schedule()
        # Reserving for one may have preempted another that was chosen before it.
        works = [pair for pair in scheduled.works if pair[0].table is not None]
        decodes = [request for request in scheduled.decodes if request.table is not None]
        if not works and not decodes:
            return self._cache.controller.idle_step(self._args.retier_pages_per_step) > 0
        if self._cache.deterministic:
            # Every sequence runs alone: results must not depend on the batch.
            for pair in works:
                if pair[0].table is not None:
                    self._run([pair], [])
            for request in decodes:
                if request.table is not None:
                    self._run([], [request])
        elif not works and self._overlap.takes(decodes):
            self._flight = self._overlap.start(decodes)
            self._cache.commit_rows(decodes)
        else:
            self._run(works, decodes)
        self._conclude(len(decodes))
        return True

    def _go_on(self, flight: Flight) -> None:
        """Launches the next decode step behind the one in flight, unless something else is to run
        before it, and takes the tokens of the one in flight."""
        follower = None
        if not self._may_admit():
            follower = self._overlap.follow(flight, self._running)
        self._flight = follower
        # Some may have been aborted in the meantime.
        pairs = zip(flight.requests, flight.drawn.wait(), strict=True)
        self._take_tokens([pair for pair in pairs if pair[0].finish is None])
        if follower is not None:
            # The tokens that it wrote are known now; those of ended sequences are dropped.
            self._cache.commit_rows([r for r in follower.requests if r.table is not None])
            self._conclude(len(follower.requests))

    def _conclude(self, rows: int) -> None:
        """What comes after a batch with so many single tokens has been launched."""
        self.statistics.record_step(rows, len(self._running), len(self._waiting), self._cache)
        is_prefilling = any(not request.prefilled for request in self._running)
        self._cache.convert(self._args.retier_pages_per_step, is_prefilling)

    def _schedule(self) -> Scheduled:
        """Chooses this step's work and reserves pages for it."""
        scheduled = Scheduled([], [])
        decodes = scheduled.decodes
        budget = self._prefill_budget
        plain = not self._cache.deterministic
        for request in one_slow(self._running):
            if plain and request.prefilled and request.written < request.room:
                decodes.append(request)  # as nearly all: one pending token, in a page that it has
                continue
            if request.table is None:
                continue  # preempted by an earlier one in this loop
            count = next_chunk(request, budget, self._cache)
            if count and self._reserve(request, count):
                budget -= self._take(request, count, scheduled)
        self._admit(scheduled, budget)
        return scheduled

    def _take(self, request: Request, count: int, scheduled: Scheduled) -> int:
        """Adds the next tokens of a request to the step; returns what they take of its budget."""
        self.statistics.scheduled(request, count)
        if count == 1:
            scheduled.decodes.append(request)
            return 0
        start = request.written
        work = Work(request.held_table, request.tokens[start : start + count], start)
        scheduled.works.append((request, work))
        return count

    def _may_admit(self) -> bool:
        """False when none of the waiting can find room now."""
        if not self._waiting or len(self._running) >= self._max_running:
            return False
        # Ordering matches all that wait: not again while nothing says that one will fit.
        # With nothing running there is nothing to wait for.
        refused = self._refused_room
        return not self._running or refused is None or self._room() > refused

    def _admit(self, scheduled: Scheduled, budget: int) -> None:
        if budget <= 0 or not self._may_admit():
            return
        self._refused_room = None
        prefilling = [request for request in self._running if not request.prefilled]
        match_length = self._cache.match_length
        for request in order_waiting(
            self._waiting.values(), self._args.schedule_policy, match_length
        ):
            if budget <= 0 or len(self._running) >= self._max_running:
                return
            if (
                self._cache.shares
                and prefilling
                and twin_ahead(request, prefilling, match_length(request), self._cache.page_size)
            ):
                continue
            if self._running and self._cache.admission_tokens(request) > self._room():
                # What is in prefill now may be what this one shares with it.
                self._refused_room = None if prefilling else self._room()
                return
            self._cache.admit(request)
            count = next_chunk(request, budget, self._cache)
            if not self._cache.reserve(request, count):
                self._cache.release(request)
                if not self._running:
                    self._stall(request)
                return
            del self._waiting[request.rid]
            self._running.append(request)
            self.statistics.admitted(request)
            prefilling.append(request)
            note_overtaking(request, self._waiting.values())
            self._take(request, count, scheduled)
            budget -= count

    def _room(self) -> int:
        """Tokens of pages for new requests: what running ones still have to compute comes first,
        and each of them needs a page to go on decoding."""
        page = self._cache.page_size
        promised = sum(page if other.prefilled else other.pending for other in self._running)
        return self._cache.obtainable_tokens() - promised

    def _reserve(self, request: Request, count: int) -> bool:
        """Reserves pages, preempting others (see `next_victim`) while there is no room.

        False when the request itself had to go.
        """
        while not self._cache.reserve(request, count):
            victim = next_victim(self._running)
            if victim is not request:
                self._preempt(victim)
                continue
            self._give_way(request)
            return False
        return True

    def _give_way(self, request: Request) -> None:
        """Preempts a request that finds no room for itself."""
        alone = len(self._running) == 1
        self._preempt(request)
        if alone:
            self._stall(request)

    def _stall(self, request: Request) -> None:
        """The only request has no room: it starts again in an empty cache, or ends for good."""
        self._cache.flush()
        request.stalls += 1
        if request.stalls > 2:
            self._fail(request, "the KV cache cannot hold this request")

    def _preempt(self, request: Request) -> None:
        """Takes the pages of a running request; sealed ones stay cached while there is room."""
        self._running.remove(request)
        self._cache.release(request)
        request.preemptions += 1
        request.prefilled = False
        self._queue(request)
        self.statistics.preemptions += 1

    def _run(self, works: list[tuple[Request, Work]], decodes: list[Request]) -> None:
        cache, logits = self._cache, self._runner.logits
        plain = not works and all(request.prefilled for request in decodes)
        output = self._launcher.run([work for _, work in works], decode_rows(decodes), plain)
        self.statistics.idle.end(plain)
        hidden = output.hidden
        last_rows: list[int] = []
        sampling: list[Request] = []
        row = 0
        for request, work in works:
            count = len(work.token_ids)
            if not request.prefilled and request.wants_input_logprobs:
                record_prompt_rows(request, logits, work.start, hidden[row : row + count])
            row += count
            cache.commit(request, count)
            if request.pending == 0:
                last_rows.append(row - 1)
                sampling.append(request)
        for request in decodes:
            if not request.prefilled and request.wants_input_logprobs:
                record_prompt_rows(request, logits, request.written, hidden[row : row + 1])
            if request.written + 1 == len(request.tokens):
                last_rows.append(row)
                sampling.append(request)
            row += 1
        cache.commit_rows(decodes)
        if sampling:
            self._sample(sampling, output.logits(last_rows))

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        drawing = [r for r in requests if r.prefilled or r.message.sampling.max_new_tokens > 0]
        if len(drawing) < len(requests):
            drawn = set(drawing)
            logits = logits[[i for i, r in enumerate(requests) if r in drawn]]
            for request in requests:
                if request not in drawn:
                    request.prefilled = True
                    self._finish(request, FinishReason("length", 0))
                    self._send([take_output(request, request.finish)])
        if drawing:
            self._take_tokens(list(zip(drawing, draw_tokens(drawing, logits), strict=True)))

    def _take_tokens(self, sampled: list[tuple[Request, int]]) -> None:
        """Adds the token sampled for each request, ends those that it ends, and sends."""
        now = time.time()
        outputs: list[TokenOutput] = []
        for request, token in sampled:
            if token == NO_TOKEN:
                self._fail(request, "the model computed values that are no numbers", 500)
                continue
            self.statistics.generated += 1
            request.tokens.append(token)
            request.unsent.append(token)
            if not request.prefilled:
                request.prefilled = True
                request.first_token_time = request.first_token_time or now
            reason = request.stop.check(request.tokens, request.prompt_len)
            if reason is None and len(request.tokens) >= self._limit:
                reason = FinishReason("length", request.output_len)
            if reason is not None:
                self._finish(request, reason)
                outputs.append(take_output(request, reason))
            elif len(request.unsent) >= request.interval or request.reply is None:
                outputs.append(take_output(request, None))
        if outputs:
            self._send(outputs)

    def _fail(self, request: Request, message: str, status: int = 507) -> None:
        self._finish(request, FinishReason("abort", message=message, status_code=status))
        self._send([take_output(request, request.finish)])

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The one way out: pages, queues and tables forget the request."""
        request.finish = reason
        if request.table is not None:
            self._running.remove(request)
            self._cache.release(request)
        self._waiting.pop(request.rid, None)
        self._parked.remove(request)
        self._refused_room = None
        del self._requests[request.rid]
        self.statistics.finished(request)
