"""Decode steps one right behind the other: the device runs a step while the host still reads the
tokens of the one before.

A step in flight is launched; its tokens are not known to the host. What the next step needs of
them, its input ids, it takes from where the device puts them. Of a sequence that turns out to have
ended in a step, the token of the step behind it is dropped: that was written where nobody reads,
behind the committed tokens, and the pages go only to work that is launched later (see `Launcher`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minima_kernels.upload import upload
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.batch import DecodeRows
from sglang_minima.runner.drawn import DrawnTokens
from sglang_minima.runner.sampling import draw
from sglang_minima.scheduler.launcher import Launcher, decode_rows
from sglang_minima.scheduler.request import Request
from sglang_minima.server_args import ServerArgs


class Flight(NamedTuple):
    """A decode step whose tokens are not known yet. Its requests have no pending token, and may
    end before the tokens come."""

    requests: list[Request]
    drawn: DrawnTokens


class Overlap:
    """Launches decode steps without waiting for their tokens.

    Args:
        most_tokens: a sequence of so many ends.
    """

    def __init__(
        self, args: ServerArgs, cache: PrefixCache, launcher: Launcher, most_tokens: int
    ) -> None:
        self._cache = cache
        self._launcher = launcher
        self._most_tokens = most_tokens
        self.enabled = not (
            launcher.device.type == "cpu" or cache.deterministic or args.disable_overlap_schedule
        )
        """Whether steps go into flight at all."""

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether a step of one token each of these can go into flight: if nothing that the host
        would have to do with the logits, or to tell the sampler, comes between."""
        return self.enabled and all(
            request.prefilled and request.row.plain and not request.message.return_logprob
            for request in requests
        )

    def start(self, requests: list[Request]) -> Flight:
        """Launches the pending token of each request."""
        return self._launch(requests, decode_rows(requests), 0)

    def follow(self, flight: Flight, running: Sequence[Request]) -> Flight | None:
        """Launches the next step of those that go on, behind `flight`.

        None if nobody does, if one of the running requests is not in `flight`, or if there is no
        room without taking it from a running request.
        """
        if any(request.pending for request in running):
            return None
        going = [
            (i, r)
            for i, r in enumerate(flight.requests)
            if r.table is not None and not self._ends(r)
        ]
        if not going:
            return None
        for _, request in going:
            if request.written >= request.room and not self._cache.reserve(request, 1):
                return None
        requests = [request for _, request in going]
        ids = flight.drawn.ids
        if len(going) < len(flight.requests):
            places = [place for place, _ in going]
            ids = ids.index_select(0, upload(places, torch.int64, ids.device))
        rows = DecodeRows(
            [request.held_table for request in requests],
            ids,
            [request.written for request in requests],
        )
        return self._launch(requests, rows, 1)

    def _ends(self, request: Request) -> bool:
        """Whether the token in flight is surely the last."""
        return (
            request.output_len + 1 >= request.message.sampling.max_new_tokens
            or len(request.tokens) + 1 >= self._most_tokens
        )

    def _launch(self, requests: list[Request], rows: DecodeRows, ahead: int) -> Flight:
        output = self._launcher.run([], rows, follows=True)
        logits = output.logits(range(len(requests)))
        drawn = DrawnTokens(draw(logits, [request.row for request in requests], ahead))
        self._launcher.statistics.idle.end(decodes=True)
        return Flight(requests, drawn)
