"""Who owns which page: a pool of slabs, a radix tree of sealed pages, and their life cycle.

Standard library only; knows neither bytes nor tensors.
"""

from __future__ import annotations

from minima_radix.checker import check
from minima_radix.conversions import Conversion
from minima_radix.counters import LifecycleCounters
from minima_radix.eviction import POLICIES
from minima_radix.inspection import Trace, TreeWalk, Visit, trace
from minima_radix.lifecycle import PageLifecycle
from minima_radix.node import Node
from minima_radix.pool import PagePool, ReadLease
from minima_radix.references import PageReferences
from minima_radix.results import Admission, EvictedPage, InsertResult, MatchResult, Sealed
from minima_radix.slabs import KindStats, PageKindSpec, PoolStats, choose_slab_granules
from minima_radix.table import RequestTable
from minima_radix.tree import RadixTree
from minima_radix.types import (
    InvariantViolation,
    LifecycleError,
    Namespace,
    OutOfPages,
    PageReferenceError,
    ReferenceKind,
)

__all__ = [
    "POLICIES",
    "Admission",
    "Conversion",
    "EvictedPage",
    "InsertResult",
    "InvariantViolation",
    "KindStats",
    "LifecycleCounters",
    "LifecycleError",
    "MatchResult",
    "Namespace",
    "Node",
    "OutOfPages",
    "PageKindSpec",
    "PageLifecycle",
    "PagePool",
    "PageReferenceError",
    "PageReferences",
    "PoolStats",
    "RadixTree",
    "ReadLease",
    "ReferenceKind",
    "RequestTable",
    "Sealed",
    "Trace",
    "TreeWalk",
    "Visit",
    "check",
    "choose_slab_granules",
    "trace",
]
