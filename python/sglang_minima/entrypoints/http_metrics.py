"""Counts of HTTP requests and responses, by route."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNKNOWN = "unknown"
"""Stands for all paths without a route and for odd methods: what clients make up must not become
labels."""
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpMetrics(Collector):
    """The counters. Labels: endpoint (a route's path), method, status_code."""

    def __init__(self) -> None:
        labels = ["endpoint", "method"]
        self.requests = Counter(
            "sglang:http_requests", "HTTP requests received", labels, registry=None
        )
        self.responses = Counter(
            "sglang:http_responses", "HTTP responses begun", [*labels, "status_code"], registry=None
        )
        self.active = Gauge(
            "sglang:http_requests_active",
            "HTTP requests that have not been answered to the end",
            labels,
            registry=None,
        )

    def collect(self) -> Iterator[Metric]:
        """The families that have samples."""
        for counter in (self.requests, self.responses, self.active):
            yield from (family for family in counter.collect() if family.samples)


class CountRequests:
    """ASGI middleware that counts."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else UNKNOWN
        endpoint = _endpoint(scope)
        metrics = self._metrics

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.responses.labels(endpoint, method, str(message["status"])).inc()
            await send(message)

        metrics.requests.labels(endpoint, method).inc()
        active = metrics.active.labels(endpoint, method)
        active.inc()
        try:
            await self._app(scope, receive, count_and_send)
        finally:
            active.dec()


def _endpoint(scope: Scope) -> str:
    """The path of the route that a request will take."""
    for route in scope["app"].routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            return route.path
    return UNKNOWN
