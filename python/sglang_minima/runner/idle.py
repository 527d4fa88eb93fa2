"""How long a GPU has nothing to do between decode steps."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch


class _Step(NamedTuple):
    before: torch.cuda.Event | None
    """Where the decode step before this one ended; None: this is the first."""
    begin: torch.cuda.Event
    end: torch.cuda.Event


class IdleMeter:
    """Compares two events of the stream: the end of one decode step and the begin of the next.

    A step begins where its model begins. What comes before that counts as idle: the GPU waits for
    the host, the tables of the step are copied, pages may be converted. Where the host is in time
    only the latter two are left. What a step waits for within (the launch of a graph on a GPU that
    has nothing else to do, of kernel after kernel without graphs) counts as busy. Does nothing on
    other devices.
    """

    def __init__(self, device: torch.device) -> None:
        self._measures = device.type == "cuda"
        self._before: torch.cuda.Event | None = None
        self._begin: torch.cuda.Event | None = None
        self._steps: deque[_Step] = deque()
        self.steps = 0
        """Decode steps measured."""
        self.busy_seconds = 0.0
        """In decode steps that followed others."""
        self.idle_seconds = 0.0
        """Before them."""

    def begin(self, follows: bool) -> None:
        """Called right before the model is launched.

        Args:
            follows: whether this is a decode step, and the device had nothing to do but decode
                since the one before it. What else runs, or nobody asked for, is not measured.
        """
        if self._measures:
            self._begin = _record()
            if not follows:
                self._before = None

    def end(self, decodes: bool) -> None:
        """Called when all of the step is launched, which is a decode step if `decodes`."""
        if self._begin is None:
            return
        step = _Step(self._before, self._begin, _record())
        self._begin, self._before = None, step.end if decodes else None
        if decodes:
            self._steps.append(step)
            self._read()

    def _read(self) -> None:
        while self._steps and self._steps[0].end.query():  # type: ignore[no-untyped-call]
            step = self._steps.popleft()
            if step.before is not None:
                self.steps += 1
                self.idle_seconds += step.before.elapsed_time(step.begin) / 1000
                self.busy_seconds += step.begin.elapsed_time(step.end) / 1000


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
