"""Progress of slow steps (loading, converting) as a callback, and one that writes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), also at the very end with both equal."""

_STEPS = 10
_MIN_BYTES = 64 << 20


def stderr_progress(label: str) -> Progress:
    """A line on stderr for every tenth of the way; work below 64 MB stays silent."""
    reported = -1

    def report(done: int, total: int) -> None:
        nonlocal reported
        step = _STEPS * done // max(total, 1)
        if total < _MIN_BYTES or step <= reported:
            return
        reported = step
        percent = 100 * step // _STEPS
        print(f"{label}: {percent}% of {total / 1e6:,.0f} MB", file=sys.stderr, flush=True)

    return report
