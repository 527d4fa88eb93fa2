"""Progress of slow steps (loading, converting, warming up) on stderr."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from logging import INFO, Logger

from tqdm import tqdm

Progress = Callable[[int, int], None]
"""Called with (done, in all), also at the very end with both equal."""

_FIRST_LINE_SECONDS = 2.0
_LINE_SECONDS = 5.0


def stderr_progress(label: str, unit: str = "B") -> Progress:
    """A bar on a terminal; elsewhere lines, and only for work that takes longer than a moment.

    Args:
        label: what is being done.
        unit: of the numbers; "B" is shown in kB, MB, GB.
    """
    return _bar(label, unit) if sys.stderr.isatty() else _lines(label, unit)


def log_progress(logger: Logger, label: str, unit: str = "B") -> Progress:
    """`stderr_progress` where the logger shows INFO, else nothing."""
    if logger.isEnabledFor(INFO):
        return stderr_progress(label, unit)
    return lambda done, total: None


def _bar(label: str, unit: str) -> Progress:
    bar: tqdm[None] | None = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            # A terminal that tells no size has 80 columns; tqdm would show nothing there.
            columns, lines = shutil.get_terminal_size()
            scale = unit == "B"
            bar = tqdm(
                desc=label, total=total, unit=unit, unit_scale=scale, ncols=columns, nrows=lines
            )
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report


def _lines(label: str, unit: str) -> Progress:
    due = time.monotonic() + _FIRST_LINE_SECONDS
    started = False

    def report(done: int, total: int) -> None:
        nonlocal due, started
        now = time.monotonic()
        if now < due and not (started and done >= total):
            return
        due, started = now + _LINE_SECONDS, True
        size = f"{total / 1e6:,.0f} MB" if unit == "B" else f"{total} {unit}"
        print(f"{label}: {100 * done // max(total, 1)}% of {size}", file=sys.stderr, flush=True)

    return report
