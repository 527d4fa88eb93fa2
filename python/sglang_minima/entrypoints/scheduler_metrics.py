"""The scheduler's numbers as Prometheus metrics, built anew at every scrape.

`sglang:` names are those of SGLang's scheduler, with its labels; what only this server has (tiers,
page kinds, shared reads, routes) is under `minima:`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Info = dict[str, Any]
Samples = dict[tuple[str, ...], float]

RANK = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
"""Labels by which dashboards of SGLang may filter; one scheduler serves all here."""

_SGLANG_GAUGES: dict[str, tuple[str, Callable[[Info], float]]] = {
    "num_running_reqs": (
        "Sequences being decoded or prefilled",
        lambda info: info["num_running_reqs"],
    ),
    "num_queue_reqs": ("Sequences waiting", lambda info: info["num_queue_reqs"]),
    "num_used_tokens": (
        "Tokens whose KV running requests hold",
        lambda info: info["num_used_tokens"],
    ),
    "token_usage": (
        "Share of the KV arena that running requests need",
        lambda info: info["token_usage"],
    ),
    "full_token_usage": (
        "The same as token_usage: there is one kind of attention",
        lambda info: info["token_usage"],
    ),
    "max_total_num_tokens": (
        "Tokens that the KV arena can hold as Recent pages",
        lambda info: info["max_total_num_tokens"],
    ),
    "page_size": ("Tokens in a page", lambda info: info["page_size"]),
    "num_pages": ("Pages in use", lambda info: info["cache"]["pages_used"]),
    "gen_throughput": (
        "Generated tokens per second, at the last decode log line; 0 when nothing runs",
        lambda info: info["statistics"]["last_gen_throughput"] if info["num_running_reqs"] else 0.0,
    ),
    "cache_hit_rate": (
        "Cached share of the prompt tokens of the latest prefill batch",
        lambda info: info["statistics"]["last_cache_hit_rate"],
    ),
    "kv_available_tokens": (
        "Tokens that free memory can take as Recent pages",
        lambda info: info["cache"]["tokens_available"],
    ),
    "kv_evictable_tokens": (
        "Tokens in cached pages that no request needs",
        lambda info: info["cache"]["pages_evictable"] * info["page_size"],
    ),
    "kv_used_tokens": (
        "Tokens in all other pages in use",
        lambda info: (
            (info["cache"]["pages_used"] - info["cache"]["pages_evictable"]) * info["page_size"]
        ),
    ),
    "num_grammar_queue_reqs": (
        "Sequences that wait for their grammar to be compiled",
        lambda info: info["num_compiling_reqs"],
    ),
    "engine_startup_time": (
        "Seconds that the scheduler took to start",
        lambda info: info["start_seconds"],
    ),
    "engine_load_weights_time": (
        "Seconds of them for the weights",
        lambda info: info["load_seconds"],
    ),
    "is_cuda_graph": (
        "Whether decoding replays CUDA graphs",
        lambda info: float(info["cuda_graphs"]),
    ),
}

_MINIMA_GAUGES: dict[str, tuple[str, Callable[[Info], float]]] = {
    "arena_bytes": ("Bytes of the KV arena", lambda info: info["cache"]["arena_bytes"]),
    "free_slab_bytes": (
        "Bytes of the arena that no page kind has claimed",
        lambda info: info["cache"]["free_slab_bytes"],
    ),
    "tree_pages": ("Pages in the radix tree", lambda info: info["cache"]["pages_in_tree"]),
    "locked_pages": (
        "Pages of the radix tree that live requests use",
        lambda info: info["cache"]["pages_locked"],
    ),
    "evictable_pages": (
        "Pages of the radix tree that eviction may take",
        lambda info: info["cache"]["pages_evictable"],
    ),
    "compression_ratio": (
        "Bytes that the pages in use would take in BF16 over what they take",
        lambda info: info["cache"]["compression_vs_bf16"] or 1.0,
    ),
    "retier_backlog_pages": (
        "Pages that wait for their conversion",
        lambda info: info["cache"]["retier_backlog"],
    ),
}

_SGLANG_COUNTERS: dict[str, tuple[str, tuple[str, ...], Callable[[Info], Samples]]] = {
    "evicted_tokens": (
        "Tokens of evicted pages",
        (),
        lambda info: {(): info["cache"]["counters"]["evicted_pages"] * info["page_size"]},
    ),
    "num_retracted_requests": (
        "Preemptions",
        (),
        lambda info: {(): info["statistics"]["preemptions"]},
    ),
    "num_grammar": (
        "Sequences that follow a grammar",
        (),
        lambda info: {(): info["grammars"]["followed"]},
    ),
    "num_grammar_cache_hit": (
        "Those of them for which nothing had to be compiled",
        (),
        lambda info: {(): info["grammars"]["found"]},
    ),
    "cuda_graph_passes": (
        "Batches: with parts of prompts or without, by a CUDA graph or by none",
        ("mode",),
        lambda info: {(mode,): count for mode, count in info["statistics"]["passes"].items()},
    ),
    "realtime_tokens": (
        "Tokens by what was done for them, counted as it is done",
        ("mode",),
        lambda info: {
            ("prefill_compute",): info["statistics"]["computed_prompt_tokens"],
            ("prefill_cache",): info["statistics"]["cached_tokens"],
            ("decode",): info["statistics"]["generated_tokens"],
        },
    ),
}

_SGLANG_HISTOGRAMS: dict[str, tuple[str, Callable[[Info], Info]]] = {
    "eviction_duration_seconds": (
        "Time in which requests got pages, where others had to be evicted for them",
        lambda info: info["cache"]["evictions"],
    ),
    "grammar_compilation_time_seconds": (
        "Time in which a grammar was compiled",
        lambda info: info["grammars"]["compilations"],
    ),
}


def _by_kind(info: Info) -> Samples:
    return {(kind,): count for kind, count in info["statistics"]["cached_tokens_by_kind"].items()}


def _routes(info: Info) -> Samples:
    return {
        (route["operation"], route["route"], route["reason"]): route["count"]
        for route in info["routes"]
    }


def _retiered(info: Info) -> Samples:
    counts = info["cache"]["counters"]["retiered_pages"]
    return {tuple(kinds.split("->")): count for kinds, count in counts.items()}


_MINIMA_COUNTERS: dict[str, tuple[str, tuple[str, ...], Callable[[Info], Samples]]] = {
    "cached_tokens": ("Prompt tokens found in the prefix cache, by page kind", ("kind",), _by_kind),
    "copied_tokens": (
        "Prompt tokens copied from a page that a request leaves in its middle",
        (),
        lambda info: {(): info["cache"]["copied_tokens"]},
    ),
    "kv_read_bytes": (
        "KV bytes that attention has read, pages shared within a batch counted once",
        (),
        lambda info: {(): info["statistics"]["kv_read_bytes"]},
    ),
    "kv_read_bytes_per_request": (
        "KV bytes that attention would have read had every request read its own",
        (),
        lambda info: {(): info["statistics"]["kv_read_bytes_per_request"]},
    ),
    "retiered_pages": (
        "Published conversions of pages (the same kind: moves)",
        ("source", "target"),
        _retiered,
    ),
    "retier_seconds": (
        "Time spent converting pages",
        (),
        lambda info: {(): info["cache"]["retier_seconds"]},
    ),
    "route_uses": (
        "Work served by each kernel route; the reason says why a faster one was not taken",
        ("operation", "route", "reason"),
        _routes,
    ),
}


def _pages(info: Info) -> Samples:
    return {
        (kind, state): entry[f"pages_{state}"]
        for kind, entry in info["cache"]["kinds"].items()
        for state in ("used", "free")
    }


def _bytes(info: Info) -> Samples:
    return {
        (kind, state): entry[f"bytes_{state}"]
        for kind, entry in info["cache"]["kinds"].items()
        for state in ("used", "free", "slab_waste")
    }


_LABELLED_GAUGES: dict[str, tuple[str, tuple[str, ...], Callable[[Info], Samples]]] = {
    "tier_bytes": (
        "Bytes of the pages in use, by tier",
        ("tier",),
        lambda info: {(tier,): entry["bytes"] for tier, entry in info["cache"]["tiers"].items()},
    ),
    "tier_pages": (
        "Pages in use, by tier",
        ("tier",),
        lambda info: {(tier,): entry["pages"] for tier, entry in info["cache"]["tiers"].items()},
    ),
    "kv_pages": ("Pages by kind: used, free", ("kind", "state"), _pages),
    "kv_bytes": ("Bytes of the arena by kind: used, free, slab_waste", ("kind", "state"), _bytes),
}


class SchedulerCollector(Collector):
    """Turns the scheduler's latest answer to "info" into metrics.

    Args:
        model_name: label of every metric.
    """

    def __init__(self, model_name: str) -> None:
        self._model = {"model_name": model_name}
        self.info: Info | None = None

    def collect(self) -> Iterator[Metric]:
        """All families; none before the first answer."""
        info = self.info
        if info is None:
            return
        # sglang-router refuses to join the scrapes of its workers where one of them names a family
        # without a sample of it: such a family has no labels, and the others' have some.
        yield from (family for family in self._families(info) if family.samples)

    def _families(self, info: Info) -> Iterator[Metric]:
        shared = {**self._model, **RANK}
        for name, (text, value) in _SGLANG_GAUGES.items():
            yield _family(GaugeMetricFamily, f"sglang:{name}", text, shared, (), {(): value(info)})
        for name, (text, labels, samples) in _SGLANG_COUNTERS.items():
            yield _family(
                CounterMetricFamily, f"sglang:{name}", text, shared, labels, samples(info)
            )
        for name, (text, durations) in _SGLANG_HISTOGRAMS.items():
            yield _histogram(f"sglang:{name}", text, shared, durations(info))
        shape = {"page_size": str(info["page_size"]), "num_pages": str(_capacity_pages(info))}
        yield _family(
            GaugeMetricFamily,
            "sglang:cache_config_info",
            "Shape of the KV arena: its pages if all were Recent",
            self._model,
            tuple(shape),
            {tuple(shape.values()): 1},
        )
        for name, (text, value) in _MINIMA_GAUGES.items():
            yield _family(
                GaugeMetricFamily, f"minima:{name}", text, self._model, (), {(): value(info)}
            )
        for name, (text, labels, samples) in _LABELLED_GAUGES.items():
            yield _family(
                GaugeMetricFamily, f"minima:{name}", text, self._model, labels, samples(info)
            )
        for name, (text, labels, samples) in _MINIMA_COUNTERS.items():
            yield _family(
                CounterMetricFamily, f"minima:{name}", text, self._model, labels, samples(info)
            )
        for name, count in info["cache"]["counters"].items():
            if isinstance(count, int):
                text = f"{name.replace('_', ' ').capitalize()} since the start"
                yield _family(
                    CounterMetricFamily, f"minima:{name}", text, self._model, (), {(): count}
                )

    def describe(self) -> Iterable[Metric]:
        """Nothing: the families depend on the answer."""
        return ()


def _capacity_pages(info: Info) -> int:
    return int(info["max_total_num_tokens"]) // int(info["page_size"])


def _histogram(name: str, text: str, shared: dict[str, str], durations: Info) -> Metric:
    """A family from a snapshot of `Durations`; without samples as long as nothing was timed."""
    family = HistogramMetricFamily(name, text, labels=list(shared))
    totals = list(accumulate(durations["counts"]))
    if totals[-1]:
        bounds = [*map(str, durations["bounds"]), "+Inf"]
        buckets = list(zip(bounds, totals, strict=True))
        family.add_metric(list(shared.values()), buckets, durations["sum"])
    return family


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    shared: dict[str, str],
    labels: tuple[str, ...],
    samples: Samples,
) -> Metric:
    family = kind(name, text, labels=[*shared, *labels])
    for values, value in samples.items():
        family.add_metric([*shared.values(), *values], value)
    return family
