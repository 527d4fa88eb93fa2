"""Chooses what a step runs: the next tokens of running requests, and which of the waiting join."""

from __future__ import annotations

from typing import NamedTuple

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.batch import Work
from sglang_minima.scheduler.policy import (
    next_chunk,
    note_overtaking,
    one_slow,
    order_waiting,
    prefill_budget,
    twin_ahead,
)
from sglang_minima.scheduler.queues import Queues
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.reservations import Reservations
from sglang_minima.scheduler.statistics import Statistics
from sglang_minima.server_args import ServerArgs


class Scheduled(NamedTuple):
    """What one step runs."""

    works: list[tuple[Request, Work]]
    """Several tokens each."""
    decodes: list[Request]
    """One token each: the first of those pending."""


class BatchFormer:
    """Forms the batch of a step within its budget of prompt tokens, and reserves pages for it.

    Args:
        device: type of the device that the model runs on.
    """

    def __init__(
        self,
        args: ServerArgs,
        device: str,
        cache: PrefixCache,
        queues: Queues,
        reservations: Reservations,
        statistics: Statistics,
    ) -> None:
        self._cache = cache
        self._queues = queues
        self._reservations = reservations
        self._statistics = statistics
        self._policy = args.schedule_policy
        self._max_running = args.max_running_requests
        self._prefill_budget = prefill_budget(args.chunked_prefill_size, device)

    def form(self) -> Scheduled:
        """Chooses this step's work and reserves pages for it."""
        scheduled = Scheduled([], [])
        decodes = scheduled.decodes
        budget = self._prefill_budget
        plain = not self._cache.deterministic
        for request in one_slow(self._queues.running):
            if plain and request.prefilled and request.written < request.room:
                decodes.append(request)  # as nearly all: one pending token, in a page that it has
                continue
            if request.table is None:
                continue  # preempted by an earlier one in this loop
            count = next_chunk(request, budget, self._cache)
            if count and self._reservations.reserve(request, count):
                budget -= self._take(request, count, scheduled)
        self._admit(scheduled, budget)
        # Reserving for one may have preempted another that was chosen before it.
        return Scheduled(
            [pair for pair in scheduled.works if pair[0].table is not None],
            [request for request in decodes if request.table is not None],
        )

    def may_admit(self) -> bool:
        """False when none of the waiting can find room now."""
        queues = self._queues
        if not queues.waiting or len(queues.running) >= self._max_running:
            return False
        # Ordering matches all that wait: not again while nothing says that one will fit.
        # With nothing running there is nothing to wait for.
        refused = queues.refused_room
        return not queues.running or refused is None or self._reservations.room() > refused

    def _take(self, request: Request, count: int, scheduled: Scheduled) -> int:
        """Adds the next tokens of a request to the step; returns what they take of its budget."""
        self._statistics.scheduled(request, count)
        if count == 1:
            scheduled.decodes.append(request)
            return 0
        start = request.written
        work = Work(request.held_table, request.tokens[start : start + count], start)
        scheduled.works.append((request, work))
        return count

    def _admit(self, scheduled: Scheduled, budget: int) -> None:
        """Starts waiting requests while the budget, and the room, lasts."""
        if budget <= 0 or not self.may_admit():
            return
        cache, queues, reservations = self._cache, self._queues, self._reservations
        queues.refused_room = None
        prefilling = [request for request in queues.running if not request.prefilled]
        match_length = cache.match_length
        for request in order_waiting(queues.waiting.values(), self._policy, match_length):
            if budget <= 0 or len(queues.running) >= self._max_running:
                return
            if (
                cache.shares
                and prefilling
                and twin_ahead(request, prefilling, match_length(request), cache.page_size)
            ):
                continue
            if queues.running and cache.admission_tokens(request) > reservations.room():
                # What is in prefill now may be what this one shares with it.
                queues.refused_room = None if prefilling else reservations.room()
                return
            cache.admit(request)
            count = next_chunk(request, budget, cache)
            if not cache.reserve(request, count):
                cache.release(request)
                if not queues.running:
                    reservations.stall(request)
                return
            queues.start(request)
            self._statistics.admitted(request)
            prefilling.append(request)
            note_overtaking(request, queues.waiting.values())
            self._take(request, count, scheduled)
            budget -= count
