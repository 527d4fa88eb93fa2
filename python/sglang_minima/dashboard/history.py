"""What the server did lately: samples every other second, for half an hour."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, NamedTuple

from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.state import EngineDead, RequestState

logger = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two samples."""
_SAMPLES = 900
_WINDOW = 60.0
"""Seconds over which latencies are told."""
_EVENTS = 4096


class Quantiles(NamedTuple):
    """Of the latest minute; None without an event."""

    p50: float | None
    p95: float | None
    requests: int


class LatencyWindow:
    """Observes requests: time to first token, and time per output token after it."""

    def __init__(self) -> None:
        self._first: deque[tuple[float, float]] = deque(maxlen=_EVENTS)
        self._per_token: deque[tuple[float, float]] = deque(maxlen=_EVENTS)

    def received(self, state: RequestState) -> None:
        """Nothing has taken any time yet."""

    def progressed(self, state: RequestState, new_tokens: int) -> None:
        """Notes the time of a first token."""
        if new_tokens and state.completion_tokens == new_tokens:
            self._first.append((state.updated, state.latency))

    def finished(self, state: RequestState) -> None:
        """Notes the mean time of the tokens after the first."""
        if state.first_token is not None and state.completion_tokens > 1:
            seconds = state.updated - state.first_token
            self._per_token.append((state.updated, seconds / (state.completion_tokens - 1)))

    def first_token(self) -> Quantiles:
        """Seconds from arrival to first token."""
        return _quantiles(self._first)

    def per_token(self) -> Quantiles:
        """Seconds per output token of finished requests."""
        return _quantiles(self._per_token)


def _quantiles(events: deque[tuple[float, float]]) -> Quantiles:
    horizon = time.monotonic() - _WINDOW
    while events and events[0][0] < horizon:
        events.popleft()
    values = sorted(value for _, value in events)
    if not values:
        return Quantiles(None, None, 0)
    last = len(values) - 1
    return Quantiles(values[round(0.5 * last)], values[round(0.95 * last)], len(values))


class History:
    """Samples of the scheduler's numbers; `info` is the latest whole answer."""

    def __init__(self, manager: TokenizerManager, latency: LatencyWindow) -> None:
        self._manager = manager
        self._latency = latency
        self._samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self._counters: dict[str, int] = {}
        self.info: dict[str, Any] | None = None

    async def run(self) -> None:
        """Samples for ever."""
        while True:
            try:
                reply = await self._manager.control("info")
            except (EngineDead, TimeoutError):
                logger.debug("no sample for the dashboard", exc_info=True)
            else:
                self._add(reply.value)
            await asyncio.sleep(INTERVAL)

    def since(self, moment: float) -> list[dict[str, Any]]:
        """Samples later than `moment` (their "time"), the oldest first."""
        return [sample for sample in self._samples if sample["time"] > moment]

    def _add(self, info: dict[str, Any]) -> None:
        cache, counts = info["cache"], info["statistics"]
        names = ("generated_tokens", "computed_prompt_tokens", "prompt_tokens", "cached_tokens")
        before, self._counters = self._counters, {name: counts[name] for name in names}
        now = time.time()
        sample: dict[str, Any] = {
            "time": now,
            "bytes": {tier: entry["bytes"] for tier, entry in cache["tiers"].items()},
            "running": info["num_running_reqs"],
            "waiting": info["num_queue_reqs"],
            "usage": info["token_usage"],
            "ttft": self._latency.first_token()._asdict(),
            "tpot": self._latency.per_token()._asdict(),
            "generated": 0.0,
            "computed": 0.0,
            "hit_rate": None,
        }
        if before and self._samples:
            seconds = max(now - self._samples[-1]["time"], 1e-3)
            grown = {name: self._counters[name] - before[name] for name in names}
            sample["generated"] = grown["generated_tokens"] / seconds
            sample["computed"] = grown["computed_prompt_tokens"] / seconds
            if grown["prompt_tokens"]:
                sample["hit_rate"] = grown["cached_tokens"] / grown["prompt_tokens"]
        self.info = info
        self._samples.append(sample)
