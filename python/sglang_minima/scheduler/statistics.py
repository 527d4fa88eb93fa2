"""Counters of the scheduler and the log lines that SGLang users know."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.scheduler.request import Request

if TYPE_CHECKING:
    from sglang_minima.runner.batch import Work

logger = logging.getLogger(__name__)


class Statistics:
    """What has happened since the start; read by /server_info and /metrics."""

    def __init__(self, decode_log_interval: int) -> None:
        self.received = 0
        self.completed = 0
        self.aborted = 0
        self.preemptions = 0
        self.generated = 0
        self.computed_tokens = 0
        """Tokens that ran through the model as prompts (again after a preemption)."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.cached_by_tier: dict[str, int] = {}
        self.gen_throughput = 0.0
        self._interval = decode_log_interval
        self._decode_steps = 0
        self._interval_started = time.perf_counter()
        self._interval_tokens = 0
        self._new_requests = 0
        self._new_cached = 0

    def admitted(self, request: Request) -> None:
        """Counts a request that has got its cached prefix (only its first admission)."""
        self._new_requests += 1
        if request.preemptions:
            return
        self._new_cached += request.cached_tokens
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.cached_tokens
        for kind, count in request.cached_by_tier.items():
            self.cached_by_tier[kind] = self.cached_by_tier.get(kind, 0) + count

    def finished(self, request: Request) -> None:
        if request.finish is not None and request.finish.type == "abort":
            self.aborted += 1
        else:
            self.completed += 1

    def record_step(
        self,
        works: Sequence[tuple[Request, Work]],
        running: int,
        waiting: int,
        cache: PrefixCache,
    ) -> None:
        """Counts one step and logs it as users expect: every prefill, decodes now and then."""
        extend: list[int] = []
        for request, work in works:
            count = len(work.token_ids)
            if work.start < request.prompt_len:
                self.computed_tokens += count
            if count > 1:
                extend.append(count)
        decodes = len(works) - len(extend)
        self._interval_tokens += decodes
        if extend or self._new_requests:
            logger.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, "
                "token usage: %.2f, #running-req: %d, #queue-req: %d",
                self._new_requests,
                sum(extend),
                self._new_cached,
                usage(cache),
                running,
                waiting,
            )
            self._new_requests = self._new_cached = 0
        if not decodes:
            return
        self._decode_steps += 1
        if self._decode_steps % self._interval == 0:
            now = time.perf_counter()
            self.gen_throughput = self._interval_tokens / (now - self._interval_started)
            logger.info(
                "Decode batch, #running-req: %d, token usage: %.2f, "
                "gen throughput (token/s): %.2f, #queue-req: %d",
                running,
                usage(cache),
                self.gen_throughput,
                waiting,
            )
            self._interval_started = now
            self._interval_tokens = 0

    def snapshot(self) -> dict[str, Any]:
        """All counters by name."""
        return {
            "requests_received": self.received,
            "requests_completed": self.completed,
            "requests_aborted": self.aborted,
            "preemptions": self.preemptions,
            "generated_tokens": self.generated,
            "computed_prompt_tokens": self.computed_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_tokens_by_kind": dict(self.cached_by_tier),
            "cache_hit_rate": self.cached_tokens / self.prompt_tokens
            if self.prompt_tokens
            else 0.0,
            "last_gen_throughput": self.gen_throughput,
        }


def usage(cache: PrefixCache) -> float:
    """Share of the arena that holds pages which requests need now (evictable ones not counted)."""
    pool = cache.pool
    used = sum(kind.granules_used for kind in pool.stats().kinds.values())
    return (used - pool.cache_only_granules) / pool.total_granules
