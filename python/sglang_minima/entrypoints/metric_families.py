"""Which of the scheduler's numbers are metrics: name, help text, where the value comes from.

`sglang:` names are those of SGLang's scheduler, with its labels; what only this server has (tiers,
page kinds, shared reads, routes) is under `minima:`. A new metric is one entry of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Info = dict[str, Any]
Samples = dict[tuple[str, ...], float]


class Family(NamedTuple):
    """What a metric says: one number, or one for each combination of values of its labels."""

    text: str
    value: Callable[[Info], float | Samples]
    labels: tuple[str, ...] = ()


def _cache(key: str) -> Callable[[Info], float]:
    return lambda info: info["cache"][key]


def _statistic(key: str) -> Callable[[Info], float]:
    return lambda info: info["statistics"][key]


def _evictable(info: Info) -> int:
    return int(info["cache"]["pages_evictable"] * info["page_size"])


def _throughput(info: Info) -> float:
    return info["statistics"]["last_gen_throughput"] if info["num_running_reqs"] else 0.0


def _by_mode(info: Info) -> Samples:
    counts = info["statistics"]
    return {
        ("prefill_compute",): counts["computed_prompt_tokens"],
        ("prefill_cache",): counts["cached_tokens"],
        ("decode",): counts["generated_tokens"],
    }


def _by_kind(info: Info) -> Samples:
    return {(kind,): count for kind, count in info["statistics"]["cached_tokens_by_kind"].items()}


def _by_tier(key: str) -> Callable[[Info], Samples]:
    return lambda info: {(tier,): entry[key] for tier, entry in info["cache"]["tiers"].items()}


def _by_state(what: str, *states: str) -> Callable[[Info], Samples]:
    return lambda info: {
        (kind, state): entry[f"{what}_{state}"]
        for kind, entry in info["cache"]["kinds"].items()
        for state in states
    }


def _retiered(info: Info) -> Samples:
    counts = info["cache"]["counters"]["retiered_pages"]
    return {tuple(kinds.split("->")): count for kinds, count in counts.items()}


def _routes(info: Info) -> Samples:
    return {
        (route["operation"], route["route"], route["reason"]): route["count"]
        for route in info["routes"]
    }


SGLANG_GAUGES = {
    "num_running_reqs": Family(
        "Sequences being decoded or prefilled", lambda info: info["num_running_reqs"]
    ),
    "num_queue_reqs": Family("Sequences waiting", lambda info: info["num_queue_reqs"]),
    "num_used_tokens": Family(
        "Tokens whose KV running requests hold", lambda info: info["num_used_tokens"]
    ),
    "token_usage": Family(
        "Share of the KV arena that running requests need", lambda info: info["token_usage"]
    ),
    "full_token_usage": Family(
        "The same as token_usage: there is one kind of attention", lambda info: info["token_usage"]
    ),
    "max_total_num_tokens": Family(
        "Tokens that the KV arena can hold as Recent pages",
        lambda info: info["max_total_num_tokens"],
    ),
    "page_size": Family("Tokens in a page", lambda info: info["page_size"]),
    "num_pages": Family("Pages in use", _cache("pages_used")),
    "gen_throughput": Family(
        "Generated tokens per second, at the last decode log line; 0 when nothing runs", _throughput
    ),
    "cache_hit_rate": Family(
        "Cached share of the prompt tokens of the latest prefill batch",
        _statistic("last_cache_hit_rate"),
    ),
    "kv_available_tokens": Family(
        "Tokens that free memory can take as Recent pages", _cache("tokens_available")
    ),
    "kv_evictable_tokens": Family("Tokens in cached pages that no request needs", _evictable),
    "kv_used_tokens": Family(
        "Tokens in all other pages in use",
        lambda info: info["cache"]["pages_used"] * info["page_size"] - _evictable(info),
    ),
    "num_grammar_queue_reqs": Family(
        "Sequences that wait for their grammar to be compiled",
        lambda info: info["num_compiling_reqs"],
    ),
    "engine_startup_time": Family(
        "Seconds that the scheduler took to start", lambda info: info["start_seconds"]
    ),
    "engine_load_weights_time": Family(
        "Seconds of them for the weights", lambda info: info["load_seconds"]
    ),
    "is_cuda_graph": Family(
        "Whether decoding replays CUDA graphs", lambda info: float(info["cuda_graphs"])
    ),
}

SGLANG_COUNTERS = {
    "evicted_tokens": Family(
        "Tokens of evicted pages",
        lambda info: info["cache"]["counters"]["evicted_pages"] * info["page_size"],
    ),
    "num_retracted_requests": Family("Preemptions", _statistic("preemptions")),
    "num_grammar": Family(
        "Sequences that follow a grammar", lambda info: info["grammars"]["followed"]
    ),
    "num_grammar_cache_hit": Family(
        "Those of them for which nothing had to be compiled",
        lambda info: info["grammars"]["found"],
    ),
    "cuda_graph_passes": Family(
        "Batches: with parts of prompts or without, by a CUDA graph or by none",
        lambda info: {(mode,): count for mode, count in info["statistics"]["passes"].items()},
        ("mode",),
    ),
    "realtime_tokens": Family(
        "Tokens by what was done for them, counted as it is done", _by_mode, ("mode",)
    ),
}

MINIMA_GAUGES = {
    "arena_bytes": Family("Bytes of the KV arena", _cache("arena_bytes")),
    "free_slab_bytes": Family(
        "Bytes of the arena that no page kind has claimed", _cache("free_slab_bytes")
    ),
    "tree_pages": Family("Pages in the radix tree", _cache("pages_in_tree")),
    "locked_pages": Family(
        "Pages of the radix tree that live requests use", _cache("pages_locked")
    ),
    "evictable_pages": Family(
        "Pages of the radix tree that eviction may take", _cache("pages_evictable")
    ),
    "compression_ratio": Family(
        "Bytes that the pages in use would take in BF16 over what they take",
        lambda info: info["cache"]["compression_vs_bf16"] or 1.0,
    ),
    "retier_backlog_pages": Family(
        "Pages that wait for their conversion", _cache("retier_backlog")
    ),
    "tier_bytes": Family("Bytes of the pages in use, by tier", _by_tier("bytes"), ("tier",)),
    "tier_pages": Family("Pages in use, by tier", _by_tier("pages"), ("tier",)),
    "kv_pages": Family(
        "Pages by kind: used, free", _by_state("pages", "used", "free"), ("kind", "state")
    ),
    "kv_bytes": Family(
        "Bytes of the arena by kind: used, free, slab_waste",
        _by_state("bytes", "used", "free", "slab_waste"),
        ("kind", "state"),
    ),
}

MINIMA_COUNTERS = {
    "cached_tokens": Family(
        "Prompt tokens found in the prefix cache, by page kind", _by_kind, ("kind",)
    ),
    "copied_tokens": Family(
        "Prompt tokens copied from a page that a request leaves in its middle",
        _cache("copied_tokens"),
    ),
    "kv_read_bytes": Family(
        "KV bytes that attention has read, pages shared within a batch counted once",
        _statistic("kv_read_bytes"),
    ),
    "kv_read_bytes_per_request": Family(
        "KV bytes that attention would have read had every request read its own",
        _statistic("kv_read_bytes_per_request"),
    ),
    "gpu_decode_seconds": Family(
        "Time that a GPU took for decode steps right behind others (0 on a CPU)",
        _statistic("gpu_decode_seconds"),
    ),
    "gpu_idle_seconds": Family(
        "Time between those steps: waiting for the host, copies of tables, conversions",
        _statistic("gpu_idle_seconds"),
    ),
    "retiered_pages": Family(
        "Published conversions of pages (the same kind: moves)", _retiered, ("source", "target")
    ),
    "retier_seconds": Family("Time spent converting pages", _cache("retier_seconds")),
    "route_uses": Family(
        "Work served by each kernel route; the reason says why a faster one was not taken",
        _routes,
        ("operation", "route", "reason"),
    ),
}

SGLANG_HISTOGRAMS: dict[str, tuple[str, Callable[[Info], Info]]] = {
    "eviction_duration_seconds": (
        "Time in which requests got pages, where others had to be evicted for them",
        lambda info: info["cache"]["evictions"],
    ),
    "grammar_compilation_time_seconds": (
        "Time in which a grammar was compiled",
        lambda info: info["grammars"]["compilations"],
    ),
}
