"""The scheduler: one step admits, runs one batch, samples, seals, retiers and sends.

    receive -> match -> admit (memory, budget) -> form one batch (a chunk of extend rows + decode
    rows) -> run -> commit and seal (share) -> sample -> finish -> retier a bounded number of pages

`Scheduler` only says what follows what. Its parts (none knows one that stands below it):

    Queues         where each request stands: parked, waiting, running
    Outputs        takes sampled tokens, ends sequences, sends
    Reservations   pages for running requests; preempts
    BatchFormer    what a step runs; admits
    Launcher       puts batches on the device
    BatchRunner    runs a batch to its end
    Overlap        launches decode steps without waiting for their tokens

Nothing in a step costs time in proportion to the number of cached prefixes. On a GPU a decode step
runs while the host deals with the tokens of the one before (see `Overlap`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from minima_radix import Namespace
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.messages import FinishReason, GenerateRequest, TokenOutput
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.scheduler.batch_former import BatchFormer
from sglang_minima.scheduler.batch_runner import BatchRunner
from sglang_minima.scheduler.launcher import Launcher
from sglang_minima.scheduler.outputs import Outputs
from sglang_minima.scheduler.overlap import Flight, Overlap
from sglang_minima.scheduler.queues import Queues
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.reservations import Reservations
from sglang_minima.scheduler.statistics import Statistics
from sglang_minima.scheduler.stopping import StopMatcher
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.tokenizer import Tokenizer


class Scheduler:
    """Serves the requests of one model; driven by `step`.

    Args:
        tokenizer: reads the text of outputs for stop strings; None where none are followed.
        eos_ids: tokens that end a sequence by default.
        send: takes messages to the detokenizer.
        grammars: compiles grammars; None where none are followed.
    """

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
        self._cache = cache
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._retier_pages = args.retier_pages_per_step
        self._next_holder = 0
        self._random = random.Random(args.random_seed)
        self.statistics = Statistics(args.decode_log_interval, runner.device)
        # Most tokens a sequence may have, prompt included.
        limit = min(runner.context_length, cache.capacity_tokens)
        self._queues = Queues(grammars)
        self._outputs = Outputs(cache, self._queues, self.statistics, limit, send)
        self._reservations = Reservations(cache, self._queues, self._outputs, self.statistics)
        self._former = BatchFormer(
            args, runner.device.type, cache, self._queues, self._reservations, self.statistics
        )
        launcher = Launcher(cache, runner, self.statistics)
        self._batches = BatchRunner(cache, runner, launcher, self._outputs)
        self._overlap = Overlap(args, cache, launcher, limit)
        self._flight: Flight | None = None

    # --- requests in and out -------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """True while any request is running or waits for room."""
        return bool(self._queues.running or self._queues.waiting)

    @property
    def busy(self) -> bool:
        """True while `step` has something to do for requests: serving, or a step is in flight,
        maybe of requests that have all been aborted."""
        return self.serving or self._flight is not None

    @property
    def running(self) -> int:
        return len(self._queues.running)

    @property
    def waiting(self) -> int:
        return len(self._queues.waiting) + len(self._queues.parked)

    @property
    def compiling(self) -> int:
        """Those of them that wait for their grammar."""
        return len(self._queues.parked)

    @property
    def running_tokens(self) -> int:
        """Tokens whose KV running requests hold."""
        return sum(request.written for request in self._queues.running)

    def add(self, message: GenerateRequest) -> None:
        """Queues a request; what it may ask for was checked before it came here.

        Raises:
            ValueError: its id is in use.
        """
        if self._queues.find(message.rid) is not None:
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
        self._queues.add(request)
        self.statistics.received += 1

    def abort(self, rid: str) -> None:
        """Ends a request at once, wherever it is; unknown ids have just finished."""
        request = self._queues.find(rid)
        if request is not None:
            self._outputs.end(request, FinishReason("abort", message="aborted by the client"))

    # --- one step ------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one batch, or takes the tokens of one in flight; False when there was nothing to do,
        not even pages to convert."""
        self._queues.parked.take(self._queues.wait, self._outputs.fail)
        if self._flight is not None:
            self._go_on(self._flight)
            return True
        works, decodes = self._former.form()
        if not works and not decodes:
            return self._cache.controller.idle_step(self._retier_pages) > 0
        if self._cache.deterministic:
            # Every sequence runs alone: results must not depend on the batch.
            for pair in works:
                if pair[0].table is not None:
                    self._batches.run([pair], [])
            for request in decodes:
                if request.table is not None:
                    self._batches.run([], [request])
        elif not works and self._overlap.takes(decodes):
            self._flight = self._overlap.start(decodes)
            self._cache.commit_rows(decodes)
        else:
            self._batches.run(works, decodes)
        self._conclude(len(decodes))
        return True

    def _go_on(self, flight: Flight) -> None:
        """Launches the next decode step behind the one in flight, unless something else is to run
        before it, and takes the tokens of the one in flight."""
        follower = None
        if not self._former.may_admit():
            follower = self._overlap.follow(flight, self._queues.running)
        self._flight = follower
        # Some may have been aborted in the meantime.
        pairs = zip(flight.requests, flight.drawn.wait(), strict=True)
        self._outputs.take([pair for pair in pairs if pair[0].finish is None])
        if follower is not None:
            # The tokens that it wrote are known now; those of ended sequences are dropped.
            self._cache.commit_rows([r for r in follower.requests if r.table is not None])
            self._conclude(len(follower.requests))

    def _conclude(self, rows: int) -> None:
        """What comes after a batch with so many single tokens has been launched."""
        running, waiting = self._queues.running, self._queues.waiting
        self.statistics.record_step(rows, len(running), len(waiting), self._cache)
        is_prefilling = any(not request.prefilled for request in running)
        self._cache.convert(self._retier_pages, is_prefilling)
