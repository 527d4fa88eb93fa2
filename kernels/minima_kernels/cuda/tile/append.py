"""A step's new rows of one layer: RoPE on queries and keys, rotation of keys and values, and their
place in open pages.

One warp per row and head: query heads, KV heads of K, KV heads of V. A lane holds consecutive
channels of its head in registers.
"""

# No `from __future__ import annotations`: TileLang evaluates annotations where they stand.
from typing import Any

import tilelang.language as T

LANES, WARPS = 32, 8
PAGE = 64  # rows of a head in a page
E4M3_MAX, MIN_SCALE = 448.0, 2.0**-14


def append(head_dim: int, page_dtype: str, dtype: str, is_signed: bool) -> Any:
    """The kernel for pages of `page_dtype` and rows of `dtype`; `is_signed`: rotation has signs."""
    own = head_dim // LANES  # channels of a lane
    own_bits = own.bit_length() - 1
    is_scaled = page_dtype == "float8_e4m3"
    own_bytes = own if is_scaled else 2 * own
    num_rows, num_heads, num_kv_heads = map(T.dynamic, ("num_rows", "num_heads", "num_kv_heads"))
    # Heads of memory from one row to the next.
    q_width, k_width, v_width = map(T.dynamic, ("q_width", "k_width", "v_width"))
    k_rows = T.dynamic("k_rows")  # leading rows whose keys are wanted back
    pieces, halves = (T.dynamic(name, "int64") for name in ("pieces", "halves"))

    @T.macro
    def load(x, source, row, head, lane):
        for e in T.vectorized(own):
            x[e] = T.cast(source[row, head, lane * own + e], "float32")

    @T.macro
    def store(target, row, head, lane, x):
        for e in T.vectorized(own):
            target[row, head, lane * own + e] = T.cast(x[e], dtype)

    @T.macro
    def turn(x, other, cosine, sine, row, lane):
        """RoPE; the channel that each is paired with is half a head away."""
        for e in T.unroll(own):
            other[e] = T.shfl_xor(x[e], LANES // 2)
        for e in T.vectorized(own):
            x[e] = x[e] * cosine[row, lane * own + e] + other[e] * sine[row, lane * own + e]

    @T.macro
    def rotate(x, other, lane):
        """The normalised Hadamard matrix, one bit of the channel's number after the other."""
        for bit in T.unroll(own_bits):
            for e in T.unroll(own):
                other[e] = x[e ^ (1 << bit)]
            for e in T.unroll(own):
                x[e] = T.if_then_else(e >> bit & 1 == 1, other[e] - x[e], x[e] + other[e])
        for bit in T.unroll(5):
            for e in T.unroll(own):
                other[e] = T.shfl_xor(x[e], 1 << bit)
            for e in T.unroll(own):
                x[e] = T.if_then_else(lane >> bit & 1 == 1, other[e] - x[e], x[e] + other[e])
        for e in T.unroll(own):
            x[e] *= head_dim**-0.5

    @T.prim_func
    def append(
        q: T.Tensor((num_rows, q_width, head_dim), dtype),
        k: T.Tensor((num_rows, k_width, head_dim), dtype),
        v: T.Tensor((num_rows, v_width, head_dim), dtype),
        cosine: T.Tensor((num_rows, head_dim), "float32"),
        sine: T.Tensor((num_rows, head_dim), "float32"),  # negative in the first half
        signs: T.Tensor((head_dim,), "float32"),
        q_out: T.Tensor((num_rows, num_heads, head_dim), dtype),
        k_out: T.Tensor((k_rows, num_kv_heads, head_dim), dtype),
        # The arena from the layer's share of its first page: pieces that a lane writes, scales.
        codes: T.Tensor((pieces, own), page_dtype),
        scales: T.Tensor((halves,), "float16"),
        page_bytes: T.Tensor((num_rows,), "int64"),  # negative: the row is not stored
        slots: T.Tensor((num_rows,), "int64"),
        v_codes: T.int32,
        k_scales: T.int32,
        v_scales: T.int32,
    ):
        groups = T.ceildiv(num_heads + 2 * num_kv_heads, WARPS)
        with T.Kernel(num_rows, groups, threads=LANES * WARPS) as (row, group):
            T.annotate_min_blocks_per_sm(6)  # 40 registers at most
            thread = T.get_thread_binding()
            vector, lane = group * WARPS + thread // LANES, thread % LANES
            x, other = T.alloc_local((own,), "float32"), T.alloc_local((own,), "float32")
            if vector < num_heads:
                load(x, q, row, vector, lane)
                turn(x, other, cosine, sine, row, lane)
                store(q_out, row, vector, lane, x)
            elif vector < num_heads + 2 * num_kv_heads:
                is_value = vector >= num_heads + num_kv_heads
                head = vector - num_heads - T.if_then_else(is_value, num_kv_heads, 0)
                if is_value:
                    load(x, v, row, head, lane)
                else:
                    load(x, k, row, head, lane)
                    turn(x, other, cosine, sine, row, lane)
                    if row < k_rows:
                        store(k_out, row, head, lane, x)
                page = page_bytes[row]
                if page >= 0:
                    if is_signed:
                        for e in T.unroll(own):
                            x[e] *= signs[lane * own + e]
                    rotate(x, other, lane)
                    place = head * PAGE + slots[row]
                    if is_scaled:
                        largest = T.alloc_var("float32", 0.0)
                        for e in T.unroll(own):
                            largest = T.max(largest, T.abs(x[e]))
                        largest = T.warp_reduce_max(largest)
                        scale = T.cast(T.max(largest / E4M3_MAX, MIN_SCALE), "float16")
                        if lane == 0:
                            start = page + T.if_then_else(is_value, v_scales, k_scales)
                            scales[start // 2 + place] = scale
                        for e in T.unroll(own):
                            x[e] /= T.cast(scale, "float32")
                    start = page + T.if_then_else(is_value, v_codes, 0)
                    for e in T.vectorized(own):
                        codes[start // own_bytes + place * LANES + lane, e] = T.cast(
                            x[e], page_dtype
                        )

    return append
