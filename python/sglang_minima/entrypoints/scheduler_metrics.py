"""The scheduler's numbers as Prometheus metrics, built anew at every scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sglang_minima.entrypoints.metric_families import (
    MINIMA_COUNTERS,
    MINIMA_GAUGES,
    SGLANG_COUNTERS,
    SGLANG_GAUGES,
    SGLANG_HISTOGRAMS,
    Family,
    Info,
    Samples,
)

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]

RANK = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
"""Labels by which dashboards of SGLang may filter; one scheduler serves all here."""

_TABLES: tuple[tuple[str, Kind, dict[str, Family]], ...] = (
    ("sglang", GaugeMetricFamily, SGLANG_GAUGES),
    ("sglang", CounterMetricFamily, SGLANG_COUNTERS),
    ("minima", GaugeMetricFamily, MINIMA_GAUGES),
    ("minima", CounterMetricFamily, MINIMA_COUNTERS),
)


class SchedulerCollector(Collector):
    """Turns the scheduler's latest answer to "info" into metrics.

    Args:
        model_name: label of every metric.
    """

    def __init__(self, model_name: str) -> None:
        self._model = {"model_name": model_name}
        self._labels = {"sglang": {**self._model, **RANK}, "minima": self._model}
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
        for prefix, kind, table in _TABLES:
            for name, (text, value, labels) in table.items():
                shared = self._labels[prefix]
                yield _family(kind, f"{prefix}:{name}", text, shared, value(info), labels)
        for name, (text, durations) in SGLANG_HISTOGRAMS.items():
            yield _histogram(f"sglang:{name}", text, self._labels["sglang"], durations(info))
        shape = {"page_size": str(info["page_size"]), "num_pages": str(_capacity_pages(info))}
        yield _family(
            GaugeMetricFamily,
            "sglang:cache_config_info",
            "Shape of the KV arena: its pages if all were Recent",
            self._model,
            {tuple(shape.values()): 1},
            tuple(shape),
        )
        for name, count in info["cache"]["counters"].items():
            if isinstance(count, int):
                text = f"{name.replace('_', ' ').capitalize()} since the start"
                yield _family(CounterMetricFamily, f"minima:{name}", text, self._model, count)

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
    kind: Kind,
    name: str,
    text: str,
    shared: dict[str, str],
    value: float | Samples,
    labels: tuple[str, ...] = (),
) -> Metric:
    family = kind(name, text, labels=[*shared, *labels])
    for values, number in (value if isinstance(value, dict) else {(): value}).items():
        family.add_metric([*shared.values(), *values], number)
    return family
