"""Puts batches on the device."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.batch import DecodeRows, Work, build_batch
from sglang_minima.runner.model_runner import ForwardOutput, ModelRunner
from sglang_minima.runner.segments import Cohorts
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.statistics import Statistics


class Launcher:
    """Lays batches out, runs the model over them and counts them.

    A GPU may be at work long after `run` has returned. Whatever touches the arena (the model,
    conversions, copies) is launched on one stream, so what is launched later finds the batch done:
    for the cache it has ended, and pages may be given to others, once it is launched.
    """

    def __init__(self, cache: PrefixCache, runner: ModelRunner, statistics: Statistics) -> None:
        self._cache = cache
        self._runner = runner
        self.statistics = statistics
        self.device = runner.device
        self._cohorts = Cohorts()

    def run(
        self, extends: Sequence[Work], rows: DecodeRows, follows: bool = False
    ) -> ForwardOutput:
        """Runs one batch.

        Args:
            follows: see `IdleMeter.begin`.
        """
        cache, runner, statistics = self._cache, self._runner, self.statistics
        lease = cache.lifecycle.begin_read()
        try:
            batch = build_batch(
                extends, rows, cache, runner.device, self._cohorts, runner.decode_memory
            )
            runner.load(batch)
            statistics.idle.begin(follows)
            output = runner.forward(batch)
            statistics.ran(batch.reads, output.replayed, bool(extends))
        finally:
            cache.lifecycle.end_read(lease)
        return output


def decode_rows(requests: Sequence[Request]) -> DecodeRows:
    """The first pending token of each request."""
    return DecodeRows(
        [request.held_table for request in requests],
        [request.tokens[request.written] for request in requests],
        [request.written for request in requests],
    )
