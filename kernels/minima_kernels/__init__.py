"""Page formats of a KV cache, and attention over pages of mixed formats.

Knows nothing of requests or trees: the caller owns the arena, the pages and who reads them.
"""

from minima_kernels.allocator import keep_freed_memory, use_huge_pages
from minima_kernels.attention import (
    AttentionOutput,
    DecodePlan,
    ExtendPlan,
    Segment,
    merge_states,
    plan_decode,
    plan_extend,
    run_decode,
    run_extend,
)
from minima_kernels.formats import BF16, F16, F32, FP8, TQ, TQ3, Format, parse_format
from minima_kernels.geometry import GRANULE, KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.rotation import Rotation
from minima_kernels.routes import ROUTES, RouteCounters
from minima_kernels.transfer import append_tokens, copy_tokens, read_page, retier

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FP8",
    "GRANULE",
    "ROUTES",
    "TQ",
    "TQ3",
    "AttentionOutput",
    "DecodePlan",
    "ExtendPlan",
    "Format",
    "KVGeometry",
    "PageKind",
    "Rotation",
    "RouteCounters",
    "Segment",
    "append_tokens",
    "copy_tokens",
    "keep_freed_memory",
    "merge_states",
    "parse_format",
    "plan_decode",
    "plan_extend",
    "read_page",
    "retier",
    "run_decode",
    "run_extend",
    "use_huge_pages",
]
