"""Keeps Python's garbage collector from walking the cache.

A tree of a million pages is millions of objects, all alive: a full collection looks at each of
them and holds the step up for a second. Nodes, pages and requests are freed by their reference
counts (a test sees to it that a request leaves no cycle behind), so full collections have nothing
to find; the young generations are collected as ever.
"""

from __future__ import annotations

import gc

_NEVER = 1 << 30


def avoid_full_collections() -> None:
    """For the rest of the process only objects made lately are looked through."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    forget_old_objects()


def forget_old_objects() -> None:
    """Takes everything that is alive now out of future collections. Cheap at any size."""
    gc.collect(1)
    gc.freeze()
