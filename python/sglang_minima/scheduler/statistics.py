"""Counters of the scheduler and the log lines that SGLang users know."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.idle import IdleMeter
from sglang_minima.scheduler.request import Request

if TYPE_CHECKING:
    from sglang_minima.runner.segments import KvReads

logger = logging.getLogger(__name__)


class Statistics:
    """What has happened since the start; read by /server_info and /metrics."""

    def __init__(self, decode_log_interval: int, device: torch.device) -> None:
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
        self.cache_hit_rate = 0.0
        """Cached share of the prompt tokens of the latest prefill batch."""
        self.kv_read_bytes = 0
        """KV bytes that attention read; pages that a batch shares count once."""
        self.kv_read_bytes_per_request = 0
        """The same, had every request of a batch read its own pages."""
        self.cuda_graph = False
        """Whether a CUDA graph ran the latest step."""
        self.passes: Counter[str] = Counter()
        """Batches by what was in them (a prompt, or only decode rows) and how they were run."""
        self.idle = IdleMeter(device)
        self._interval = decode_log_interval
        self._decode_steps = 0
        self._interval_started = time.perf_counter()
        self._interval_tokens = 0
        self._new_requests = 0
        self._new_cached = 0
        self._prefilled = 0
        self._single_prompt_rows = 0
        self._prefill_logged = self._interval_started

    def admitted(self, request: Request) -> None:
        """Counts a request that has got its cached prefix (only its first admission)."""
        self._new_requests += 1
        if request.preemptions:
            return
        request.queue_seconds = time.time() - request.arrival
        self._new_cached += request.cached_tokens
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.cached_tokens
        for kind, count in request.cached_by_tier.items():
            self.cached_by_tier[kind] = self.cached_by_tier.get(kind, 0) + count

    def ran(self, reads: KvReads, cuda_graph: bool, prefill: bool) -> None:
        """Counts one batch, and what attention read for it."""
        self.cuda_graph = cuda_graph
        phase = "prefill" if prefill else "decode"
        self.passes[f"{phase}_{'cuda_graph' if cuda_graph else 'none'}"] += 1
        self.kv_read_bytes += reads.shared
        self.kv_read_bytes_per_request += reads.per_request

    def finished(self, request: Request) -> None:
        if request.finish is not None and request.finish.type == "abort":
            self.aborted += 1
        else:
            self.completed += 1

    def scheduled(self, request: Request, tokens: int) -> None:
        """Counts tokens that a step is going to run; decode steps may be left out."""
        in_prompt = request.written < request.prompt_len
        if in_prompt:
            self.computed_tokens += tokens
        if in_prompt or tokens > 1:
            self._prefilled += tokens
        self._single_prompt_rows += in_prompt and tokens == 1

    def record_step(self, rows: int, running: int, waiting: int, cache: PrefixCache) -> None:
        """Counts one step and logs it as users expect: every prefill, decodes now and then.

        Args:
            rows: requests that ran a single token.
        """
        prefilled, decodes = self._prefilled, rows - self._single_prompt_rows
        self._prefilled = self._single_prompt_rows = 0
        self._interval_tokens += decodes
        if prefilled or self._new_requests:
            self._log_prefill(prefilled, running, waiting, cache)
        if not decodes:
            return
        self._decode_steps += 1
        if self._decode_steps % self._interval == 0:
            now = time.perf_counter()
            self.gen_throughput = self._interval_tokens / (now - self._interval_started)
            logger.info(
                "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, "
                "cuda graph: %s, gen throughput (token/s): %.2f, #queue-req: %d",
                running,
                needed_tokens(cache),
                usage(cache),
                self.cuda_graph,
                self.gen_throughput,
                waiting,
            )
            self._interval_started = now
            self._interval_tokens = 0

    def _log_prefill(self, new_tokens: int, running: int, waiting: int, cache: PrefixCache) -> None:
        now = time.perf_counter()
        prompt_tokens = new_tokens + self._new_cached
        self.cache_hit_rate = self._new_cached / prompt_tokens if prompt_tokens else 0.0
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, cuda graph: %s, input throughput (token/s): %.2f",
            self._new_requests,
            new_tokens,
            self._new_cached,
            usage(cache),
            running,
            waiting,
            self.cuda_graph,
            new_tokens / (now - self._prefill_logged),
        )
        self._new_requests = self._new_cached = 0
        self._prefill_logged = now

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
            "last_cache_hit_rate": self.cache_hit_rate,
            "last_gen_throughput": self.gen_throughput,
            "kv_read_bytes": self.kv_read_bytes,
            "kv_read_bytes_per_request": self.kv_read_bytes_per_request,
            "passes": dict(self.passes),
            "gpu_decode_seconds": self.idle.busy_seconds,
            "gpu_idle_seconds": self.idle.idle_seconds,
        }


def usage(cache: PrefixCache) -> float:
    """Share of the arena that holds pages which requests need now (evictable ones not counted)."""
    pool = cache.pool
    used = sum(kind.granules_used for kind in pool.stats().kinds.values())
    return (used - pool.cache_only_granules) / pool.total_granules


def needed_tokens(cache: PrefixCache) -> int:
    """Tokens of the pages in use that eviction may not take."""
    used = sum(kind.pages_used for kind in cache.pool.stats().kinds.values())
    evictable = 0 if cache.tree is None else cache.tree.evictable_pages
    return (used - evictable) * cache.page_size
