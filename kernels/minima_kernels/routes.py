"""Counters of which implementation served what, and why when it was not the fast one."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Route(NamedTuple):
    """An operation (``decode``, ``extend``, ``append`` ...) served by an implementation.

    ``reason`` says why a faster route was not taken; empty when this is the fastest there is.
    """

    operation: str
    route: str
    reason: str


class RouteCounters:
    """Uses of each route since the start."""

    def __init__(self) -> None:
        self._counts: Counter[Route] = Counter()

    def count(self, operation: str, route: str, reason: str = "", times: int = 1) -> None:
        """Count one use, or several."""
        self._counts[Route(operation, route, reason)] += times

    def snapshot(self) -> dict[Route, int]:
        """A copy of all counts."""
        return dict(self._counts)


ROUTES = RouteCounters()
"""The counters of this process; every run counts here unless it is given others."""
