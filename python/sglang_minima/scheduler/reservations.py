"""Pages for running requests: how much room there is, and who gives way where there is none."""

from __future__ import annotations

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.scheduler.outputs import Outputs
from sglang_minima.scheduler.policy import next_victim
from sglang_minima.scheduler.queues import Queues
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.statistics import Statistics


class Reservations:
    """Reserves pages for running requests, and preempts others for them."""

    def __init__(
        self, cache: PrefixCache, queues: Queues, outputs: Outputs, statistics: Statistics
    ) -> None:
        self._cache = cache
        self._queues = queues
        self._outputs = outputs
        self._statistics = statistics

    def room(self) -> int:
        """Tokens of pages for new requests: what running ones still have to compute comes first,
        and each of them needs a page to go on decoding."""
        page = self._cache.page_size
        running = self._queues.running
        promised = sum(page if other.prefilled else other.pending for other in running)
        return self._cache.obtainable_tokens() - promised

    def reserve(self, request: Request, count: int) -> bool:
        """Reserves pages, preempting others (see `next_victim`) while there is no room.

        False when the request itself had to go.
        """
        while not self._cache.reserve(request, count):
            victim = next_victim(self._queues.running)
            if victim is not request:
                self.preempt(victim)
                continue
            self._give_way(request)
            return False
        return True

    def preempt(self, request: Request) -> None:
        """Takes the pages of a running request; sealed ones stay cached while there is room."""
        self._queues.suspend(request)
        self._cache.release(request)
        request.preemptions += 1
        request.prefilled = False
        self._statistics.preemptions += 1

    def stall(self, request: Request) -> None:
        """The only request has no room: it starts again in an empty cache, or ends for good."""
        self._cache.flush()
        request.stalls += 1
        if request.stalls > 2:
            self._outputs.fail(request, "the KV cache cannot hold this request")

    def _give_way(self, request: Request) -> None:
        """Preempts a request that finds no room for itself."""
        alone = len(self._queues.running) == 1
        self.preempt(request)
        if alone:
            self.stall(request)
