"""Attention straight over pages of mixed formats: plan once per batch, run per layer."""

from minima_kernels.attention.decode import DecodePlan, PageEntries, plan_decode, run_decode
from minima_kernels.attention.extend import ExtendPlan, plan_extend, run_extend
from minima_kernels.attention.merge import State, merge_many, merge_states
from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import Segment

__all__ = [
    "AttentionOutput",
    "DecodePlan",
    "ExtendPlan",
    "PageEntries",
    "Segment",
    "State",
    "merge_many",
    "merge_states",
    "plan_decode",
    "plan_extend",
    "run_decode",
    "run_extend",
]
