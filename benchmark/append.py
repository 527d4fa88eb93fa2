"""The kernel that appends a step's new rows on a GPU, and its share of a decode step's attention.

RoPE of queries and keys, rotation, scale and storage of one layer, in a model of 8 layers.
Geometries: A = 24 query heads / 4 KV heads / head dim 256, B = 32 / 8 / 128. Up to 256 rows are
those of a decode step: each has a page of its own, in a random place. 2,048 rows are a prompt's,
which fill 32 pages and give their keys back. A time is the median of CUDA-graph replays of 64
kernels. The share is that of the append in the time of append and attention at 64 requests of 8,192
tokens in TQ3 pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import Claim, add_output_options, format_table, panels
from gpu_pages import GEOMETRIES, PAGE, Inputs, calls
from gpu_timing import Call, gpu_record, time_graph

from minima_kernels import (
    GRANULE,
    KVGeometry,
    PageKind,
    Rotation,
    RouteCounters,
    parse_format,
)
from minima_kernels.cuda.append import CudaAppend

LAYERS, CALLS = 8, 64
ROWS = (1, 64, 256, 2048)
PROMPT = 2048
DECODE = (64, 8192)
MOST_SHARE = 0.05

COLUMNS = {"geometry": "", "pages": "", "rows": "", "us": ".2f", "us_min": ".2f",
           "us_max": ".2f", "share": ".3f"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument("--formats", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--rounds", type=int, default=15)
    add_output_options(parser)
    arguments = parser.parse_args()
    record = gpu_record("append")
    rows: list[dict[str, Any]] = []
    for name in arguments.geometries:
        attention = time_attention(name, arguments.rounds)
        print(f"{name}: attention of a layer, {DECODE[0]} x {DECODE[1]} tokens: {attention:.1f} us")
        for format_ in arguments.formats:
            for num_rows in ROWS:
                rows.append(measure(name, format_, num_rows, attention, arguments.rounds))
        print(format_table(rows, COLUMNS), flush=True)
    claims = make_claims(rows)
    record.finish(rows, claims, draw, arguments)


def time_attention(name: str, rounds: int) -> float:
    """Microseconds of a layer's decode attention."""
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    batch, tokens = DECODE
    pages = tokens // PAGE
    inputs = Inputs(KVGeometry(1, num_kv_heads, dim, PAGE), ["tq3"], [batch * pages])
    q = torch.randn(batch, num_heads, dim, device="cuda").bfloat16()
    return time_graph(calls(inputs, inputs.segments(0, pages), q), rounds)[0]


def measure(
    name: str, format_: str, num_rows: int, attention: float, rounds: int
) -> dict[str, Any]:
    """One number of rows."""
    us, least, largest = time_graph(make_calls(name, format_, num_rows), rounds)
    return {
        "geometry": name,
        "pages": format_,
        "rows": num_rows,
        "us": us,
        "us_min": least,
        "us_max": largest,
        "share": us / (us + attention) if num_rows == DECODE[0] else None,
    }


def make_calls(name: str, format_: str, num_rows: int) -> list[Call]:
    """Appends to all layers, again and again."""
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    geometry = KVGeometry(LAYERS, num_kv_heads, dim, PAGE)
    kind = PageKind.uniform(format_, parse_format(format_), LAYERS)
    size = kind.granules(geometry) * GRANULE
    is_prompt = num_rows == PROMPT
    num_pages = num_rows // PAGE if is_prompt else num_rows
    arena = torch.zeros(num_pages * size, dtype=torch.uint8, device="cuda")
    pages = torch.randperm(num_pages).cuda() * size
    if is_prompt:
        pages, slots = pages.repeat_interleave(PAGE), torch.arange(num_rows, device="cuda") % PAGE
    else:
        slots = torch.randint(PAGE, (num_rows,), device="cuda")
    angles = torch.rand(num_rows, 1, dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    append = CudaAppend(kind, geometry, Rotation(dim, device="cuda"), arena.device)
    routes = RouteCounters()

    def call(layer: int, heads: torch.Tensor) -> object:
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        keys = num_rows if is_prompt else 0
        return append.run(layer, q, k, v, cos, sin, arena, pages, slots, keys, routes=routes)

    total = num_heads + 2 * num_kv_heads
    layers: list[Call] = []
    for layer in range(LAYERS):
        heads = torch.randn(num_rows, total, dim, device="cuda").bfloat16()
        layers.append(partial(call, layer, heads))
    return layers * (CALLS // LAYERS)


def make_claims(rows: list[dict[str, Any]]) -> list[Claim]:
    return [
        Claim.at_most(
            f"{row['geometry']}, {row['pages']} pages, {row['rows']} rows: share of the append",
            row["share"], MOST_SHARE, "",
        )
        for row in rows
        if row["share"] is not None
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Microseconds of a layer by number of rows."""
    figure, axes = panels(1, 1, (5, 3.5))
    axis = axes[0, 0]
    for panel in dict.fromkeys((row["geometry"], row["pages"]) for row in rows):
        mine = [row for row in rows if (row["geometry"], row["pages"]) == panel]
        times = [row["us"] for row in mine]
        axis.plot([row["rows"] for row in mine], times, "o-", label=f"{panel[0]}, {panel[1]} pages")
    axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="microseconds per layer")
    axis.legend()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
