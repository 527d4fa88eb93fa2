"""`Durations`: how often something took how long, for a histogram that another process exports."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Any

BOUNDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
"""Upper bounds of the buckets, in seconds; one more bucket has no bound."""


class Durations:
    """Counts of durations by bucket; any thread may observe."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Counts one."""
        with self._lock:
            self._counts[bisect_left(BOUNDS, seconds)] += 1
            self._sum += seconds

    def snapshot(self) -> dict[str, Any]:
        """{"bounds": the buckets' upper bounds, "counts": one more than these, "sum": seconds}."""
        with self._lock:
            return {"bounds": list(BOUNDS), "counts": self._counts.copy(), "sum": self._sum}
