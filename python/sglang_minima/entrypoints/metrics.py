"""Prometheus metrics, under the names that dashboards for SGLang use, plus the page tiers."""

from __future__ import annotations

import logging
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_minima.tokenization.state import RequestState

logger = logging.getLogger("sglang_minima.requests")

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 40, 60, 120, 300),
)
_TOKENS = tuple(2**power for power in range(18))

_GAUGES = {
    "num_running_reqs": "Sequences being decoded or prefilled",
    "num_queue_reqs": "Sequences waiting",
    "num_used_tokens": "Tokens whose KV running requests hold",
    "token_usage": "Share of the KV arena that running requests need",
    "max_total_num_tokens": "Tokens that the KV arena can hold",
    "page_size": "Tokens in a page",
    "gen_throughput": "Generated tokens per second, at the last decode log line",
    "cache_hit_rate": "Cached share of all prompt tokens since the start",
    "num_pages": "Pages in use",
    "kv_evictable_tokens": "Tokens in cached pages that no request needs",
    "kv_locked_tokens": "Tokens in cached pages that requests need",
    "kv_arena_bytes": "Bytes of the KV arena",
    "kv_compression_ratio": "Bytes the pages in use would take in BF16 over what they take",
    "retier_backlog": "Pages that wait for their conversion",
}

_LABELLED_GAUGES = {
    "kv_pages": (("kind", "state"), "Pages by kind: used, free"),
    "kv_bytes": (("kind", "state"), "Bytes of the arena by kind: used, free, slab_waste"),
    "kv_events": (("event", "kinds"), "Page life-cycle events since the start"),
    "routes": (
        ("operation", "route", "reason"),
        "Work served by each kernel route so far",
    ),
}


def gauge_values(info: dict[str, Any]) -> dict[str, float]:
    """Values of the plain gauges from the scheduler's answer to "info"."""
    cache, statistics = info["cache"], info["statistics"]
    values = {name: info[name] for name in _GAUGES if name in info}
    values |= {
        "gen_throughput": statistics["last_gen_throughput"],
        "cache_hit_rate": statistics["cache_hit_rate"],
        "num_pages": cache["pages_used"],
        "kv_evictable_tokens": cache["pages_evictable"] * info["page_size"],
        "kv_locked_tokens": cache["pages_locked"] * info["page_size"],
        "kv_arena_bytes": cache["arena_bytes"],
        "kv_compression_ratio": cache["compression_vs_bf16"] or 1.0,
        "retier_backlog": cache["retier_backlog"],
    }
    return values


def labelled_values(info: dict[str, Any]) -> dict[str, dict[tuple[str, ...], float]]:
    """Values of the labelled gauges, by label values in the order of `_LABELLED_GAUGES`."""
    pages: dict[tuple[str, ...], float] = {}
    sizes: dict[tuple[str, ...], float] = {}
    for kind, entry in info["cache"]["kinds"].items():
        for state in ("used", "free"):
            pages[kind, state] = entry[f"pages_{state}"]
        for state in ("used", "free", "slab_waste"):
            sizes[kind, state] = entry[f"bytes_{state}"]
    events: dict[tuple[str, ...], float] = {}
    for event, count in info["cache"]["counters"].items():
        # Some events are counted by the kinds they go between, e.g. {"fp8->tq3": 5}.
        by_kinds = count if isinstance(count, dict) else {"": count}
        events |= {(event, kinds): number for kinds, number in by_kinds.items()}
    return {
        "kv_pages": pages,
        "kv_bytes": sizes,
        "kv_events": events,
        "routes": {
            (route["operation"], route["route"], route["reason"]): route["count"]
            for route in info["routes"]
        },
    }


class ServerMetrics:
    """All metrics of one server; also writes the request log when that is wanted.

    Args:
        model_name: label of every metric.
        log_requests: write one line per finished request (ids and counts, never prompt text).
    """

    def __init__(self, model_name: str, log_requests: bool = False) -> None:
        self._log_requests = log_requests
        self._model_name = model_name
        self._label = {"model_name": model_name}
        self._registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"sglang:{name}", text, ["model_name"], registry=self._registry)
            for name, text in _GAUGES.items()
        }
        self._labelled = {
            name: Gauge(f"sglang:{name}", text, ["model_name", *labels], registry=self._registry)
            for name, (labels, text) in _LABELLED_GAUGES.items()
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self._requests = self._counter("num_requests", "Finished requests")
        self._aborted = self._counter("num_aborted_requests", "Aborted requests")
        self._retracted = self._counter("num_retracted_requests", "Preemptions")
        self._cached_tokens = Counter(
            "sglang:cached_tokens",
            "Prompt tokens found in the prefix cache",
            ["model_name", "source"],
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _SECONDS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request", _SECONDS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token", _SECONDS
        )
        self._prompt_sizes = self._histogram(
            "prompt_tokens_histogram", "Prompt tokens a request", _TOKENS
        )
        self._uncached_sizes = self._histogram(
            "uncached_prompt_tokens_histogram", "Computed prompt tokens a request", _TOKENS
        )
        self._generation_sizes = self._histogram(
            "generation_tokens_histogram", "Generated tokens a request", _TOKENS
        )

    def progressed(self, state: RequestState, new_tokens: int) -> None:
        """Observes one output."""
        if not new_tokens:
            return
        self._generation_tokens.inc(new_tokens)
        if state.completion_tokens == new_tokens:
            self._first_token.observe(state.latency)
            return
        for _ in range(new_tokens):
            self._inter_token.observe(state.interval / new_tokens)

    def finished(self, state: RequestState) -> None:
        """Observes the end of a request."""
        self._requests.inc()
        self._prompt_tokens.inc(state.prompt_tokens)
        self._retracted.inc(state.preemptions)
        for source, count in state.cached_by_tier.items():
            self._cached_tokens.labels(**self._label, source=source).inc(count)
        if state.finish is not None and state.finish.type == "abort":
            self._aborted.inc()
        self._latency.observe(state.latency)
        self._prompt_sizes.observe(state.prompt_tokens)
        self._uncached_sizes.observe(state.prompt_tokens - state.cached_tokens)
        self._generation_sizes.observe(state.completion_tokens)
        if self._log_requests:
            self._log(state)

    def render(self, info: dict[str, Any]) -> bytes:
        """The exposition text; `info` is the scheduler's answer to "info"."""
        for name, value in gauge_values(info).items():
            self._gauges[name].labels(**self._label).set(value)
        for name, values in labelled_values(info).items():
            for labels, value in values.items():
                self._labelled[name].labels(self._model_name, *labels).set(value)
        return generate_latest(self._registry)

    def _log(self, state: RequestState) -> None:
        logger.info(
            "Request %s: #prompt-token: %d, #cached-token: %d, #output-token: %d, finish: %s, "
            "first token: %.3f s, total: %.3f s",
            state.rid,
            state.prompt_tokens,
            state.cached_tokens,
            state.completion_tokens,
            state.finish.type if state.finish else None,
            (state.first_token or state.updated) - state.created,
            state.latency,
        )

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"sglang:{name}", text, ["model_name"], registry=self._registry)
        return metric.labels(**self._label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"sglang:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
        )
        return metric.labels(**self._label)
