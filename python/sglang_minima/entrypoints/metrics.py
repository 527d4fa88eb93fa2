"""Prometheus metrics, under the names that dashboards for SGLang use, plus our own (`minima:`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sglang_minima.entrypoints.http_metrics import HttpMetrics
from sglang_minima.entrypoints.scheduler_metrics import RANK, SchedulerCollector
from sglang_minima.tokenization.state import RequestState

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 40, 60, 120, 300),
)
_TOKENS = tuple(2**power for power in range(18))


class ServerMetrics:
    """All metrics of one server; observes the requests of the HTTP process.

    Args:
        model_name: label of every metric.
    """

    def __init__(self, model_name: str) -> None:
        self._label = {"model_name": model_name}
        self._registry = CollectorRegistry()
        self._scheduler = SchedulerCollector(model_name)
        self._registry.register(self._scheduler)
        self.http = HttpMetrics()
        self._registry.register(self.http)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self._requests = self._counter("num_requests", "Finished requests")
        self._aborted = self._counter("num_aborted_requests", "Aborted requests")
        self._constrained = self._counter(
            "num_so_requests", "Finished requests whose output had to follow a grammar"
        )
        cached = Counter(
            "sglang:cached_tokens",
            "Prompt tokens of finished requests that were found in the prefix cache",
            ["model_name", "source"],
            registry=self._registry,
        )
        self._cached_tokens = cached.labels(**self._label, source="device")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _SECONDS
        )
        inter_token = self._new_histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request", _SECONDS
        )
        self._registry.register(_Renamed(inter_token, "sglang:time_per_output_token_seconds"))
        self._inter_token = inter_token.labels(**self._label)
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token", _SECONDS
        )
        self._queue_time = self._histogram(
            "queue_time_seconds", "Arrival at the scheduler to admission", _SECONDS
        )
        stages = Histogram(
            "sglang:per_stage_req_latency_seconds",
            "prefill_forward: admission to first token",
            ["model_name", *RANK, "stage"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._prefill = stages.labels(**self._label, **RANK, stage="prefill_forward")
        self._retractions = self._histogram(
            "num_retractions", "Preemptions a request", (*range(11), 20, 50, 100)
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

    def received(self, state: RequestState) -> None:
        """Nothing is counted before an output arrives."""

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
        self._cached_tokens.inc(state.cached_tokens)
        if state.finish is not None and state.finish.type == "abort":
            self._aborted.inc()
        self._latency.observe(state.latency)
        if state.queue_seconds is not None:
            self._queue_time.observe(state.queue_seconds)
        if state.prefill_seconds is not None:
            self._prefill.observe(state.prefill_seconds)
        if state.request.sampling.grammar is not None:
            self._constrained.inc()
        self._retractions.observe(state.preemptions)
        self._prompt_sizes.observe(state.prompt_tokens)
        self._uncached_sizes.observe(state.prompt_tokens - state.cached_tokens)
        self._generation_sizes.observe(state.completion_tokens)

    def render(self, info: dict[str, Any]) -> bytes:
        """The exposition text; `info` is the scheduler's answer to "info"."""
        self._scheduler.info = info
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"sglang:{name}", text, ["model_name"], registry=self._registry)
        return metric.labels(**self._label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._new_histogram(name, text, buckets).labels(**self._label)

    def _new_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"sglang:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
        )


class _Renamed(Collector):
    """Exports a metric under a second name, which older dashboards use, without counting twice."""

    def __init__(self, source: Histogram, name: str) -> None:
        self._source = source
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            renamed = Metric(self._name, family.documentation, family.type)
            renamed.samples = [
                sample._replace(name=self._name + sample.name.removeprefix(family.name))
                for sample in family.samples
            ]
            yield renamed

    def describe(self) -> Iterable[Metric]:
        return ()
