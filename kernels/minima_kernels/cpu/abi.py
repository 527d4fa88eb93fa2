"""The structures of the native extension's C interface: ``native/abi.h``, field by field."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p
from enum import IntEnum


class FormatType(IntEnum):
    """How a page's codes are read."""

    F32 = 0
    F16 = 1
    BF16 = 2
    FP8 = 3
    TQ = 4


class Format(Structure):
    """``MinimaFormat``: byte offsets of the parts of one layer's share of a page."""

    _fields_ = [
        ("type", c_int32),
        ("k_levels", c_int32),
        ("v_levels", c_int32),
        ("padding", c_int32),
        *((name, c_int64) for name in ("k_codes", "k_scales", "k_mean", "v_codes", "v_scales")),
        *(
            (f"{name}_head", c_int64)
            for name in ("k_codes", "k_scales", "k_mean", "v_codes", "v_scales")
        ),
    ]


class Geometry(Structure):
    """``MinimaGeometry``."""

    _fields_ = [(name, c_int32) for name in ("kv_heads", "group", "head_dim", "page_size")]


class DecodePlan(Structure):
    """``MinimaDecodePlan``."""

    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_items", "num_partials")),
        *(
            (name, c_void_p)
            for name in (
                "pages",
                "item_page",
                "item_kind",
                "item_last",
                "item_reader",
                "item_readers",
                "item_partial",
                "item_entry",
                "readers",
                "row_partial",
                "row_partials",
            )
        ),
    ]


class ExtendPlan(Structure):
    """``MinimaExtendPlan``."""

    _fields_ = [
        ("num_requests", c_int64),
        *(
            (name, c_void_p)
            for name in ("q_indptr", "run_indptr", "run_page", "run_kind", "run_last", "pages")
        ),
    ]
