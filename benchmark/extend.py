"""Attention of new tokens over cached ones on a GPU, by the format of the pages.

One layer, everything from unrotated queries to the output, work lists made beforehand. One request
with 16 to 4,096 new tokens over 32,768 cached ones, and 64 requests with 16 each over 1,216 of
their own. Every case runs both ways, cached pages read by the decode kernels (`rows`) and expanded
for flash attention request by request (`tiles`); the plan takes the one that is marked. The
yardsticks: the same over BF16 pages, and torch's flash attention over a dense BF16 prefix that lies
ready. Geometries A = 24 query heads / 4 KV heads / head dim 256, B = 32 / 8 / 128.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from common import Claim, add_output_options, format_table, panels
from gpu_pages import GEOMETRIES, PAGE, Inputs
from gpu_timing import gpu_record, time_events

from minima_kernels import KVGeometry, Rotation, RouteCounters, Segment, plan_extend, run_extend
from minima_kernels.cuda import extend as cuda_extend
from minima_kernels.cuda import stacked

FORMATS = ("bf16", "fp8", "tq3", "tq(16,4)")
TARGET = 1.1
UNLIMITED = 1 << 40


class Case(NamedTuple):
    """Requests with so many new tokens each over so many cached ones of their own."""

    requests: int
    new: int
    cached: int


CASES = (*(Case(1, count, 32768) for count in (16, 128, 512, 4096)), Case(64, 16, 1216))
WITH_TARGET = CASES[2:4]

COLUMNS = {"geometry": "", "requests": "", "new": "", "cached": "", "prefix": "", "way": "",
           "planned": "", "us": ".0f", "over_bf16": ".2f"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument("--rounds", type=int, default=9)
    add_output_options(parser)
    arguments = parser.parse_args()
    record = gpu_record("extend")
    rows: list[dict[str, Any]] = []
    for name in arguments.geometries:
        for case in CASES:
            found = measure(name, case, arguments.rounds)
            print(format_table(found, COLUMNS), flush=True)
            rows += found
    record.finish(rows, make_claims(rows), draw, arguments)


def make_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The planned way against BF16 pages, and against the other way."""
    claims = []
    for row in rows:
        if not row["planned"]:
            continue
        case = Case(row["requests"], row["new"], row["cached"])
        name = f"{row['geometry']}: {case.requests} x {case.new} new tokens over {row['prefix']}"
        if case in WITH_TARGET and row["prefix"] != "bf16":
            claims.append(Claim.at_most(f"{name}, over BF16 pages", row["over_bf16"], TARGET, "x"))
        other = next(
            other
            for other in rows
            if other["way"] not in (row["way"], "dense")
            and all(other[key] == row[key] for key in ("geometry", *Case._fields, "prefix"))
        )
        value = row["us"] / other["us"]
        claims.append(Claim.at_most(f"{name}: {row['way']} over {other['way']}", value, 1.05, "x"))
    return claims


def measure(name: str, case: Case, rounds: int) -> list[dict[str, Any]]:
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    geometry, pages = KVGeometry(1, num_kv_heads, dim, PAGE), case.cached // PAGE
    num_rows = case.requests * case.new
    q = torch.randn(num_rows, num_heads, dim, device="cuda").bfloat16()
    k, v = (torch.randn(num_rows, num_kv_heads, dim, device="cuda").bfloat16() for _ in range(2))
    rotation = Rotation(dim, device="cuda")
    rows: list[dict[str, Any]] = []

    def add(prefix: str, way: str, planned: bool, us: float) -> None:
        rows.append(
            {"geometry": name, **case._asdict(), "prefix": prefix, "way": way, "planned": planned,
             "us": us}
        )  # fmt: skip

    for format_ in FORMATS:
        inputs = Inputs(geometry, [format_], [case.requests * pages])
        segments = [
            Segment(part, 0, PAGE, [request])
            for request, part in enumerate(inputs.addresses[0].split(pages))
        ]
        indptr = list(range(0, num_rows + 1, case.new))
        plan = partial(plan_extend, segments, indptr, inputs.kinds, geometry, "cuda")
        planned = "tiles" if plan().cuda(num_heads).stacked is None else "rows"
        for way, reason in (("rows", None), ("tiles", "not this way")):
            routes = RouteCounters()
            with (
                patch.object(stacked, "MOST_TILE_READS", UNLIMITED),
                patch.object(cuda_extend, "stacked_reason", lambda *_, reason=reason: reason),
            ):
                run = partial(
                    run_extend, plan(), q, k, v, inputs.arenas[0], 0, dim**-0.5,
                    rotation=rotation, routes=routes,
                )  # fmt: skip
                us = time_events(run, rounds) * 1e3
            used = {route.route for route in routes.snapshot() if route.operation == "extend"}
            assert used == {"stacked" if way == "rows" else "flash"}, used
            add(format_, way, way == planned, us)
    if case.requests == 1:
        add("dense", "dense", False, time_events(dense(q, num_kv_heads, case), rounds) * 1e3)
    bf16 = next(row["us"] for row in rows if row["prefix"] == "bf16" and row["planned"])
    return [{**row, "over_bf16": row["us"] / bf16} for row in rows]


def dense(q: torch.Tensor, num_kv_heads: int, case: Case) -> Any:
    """Flash attention over a dense prefix and, causally, the new tokens themselves."""
    count, num_heads, dim = q.shape
    group = num_heads // num_kv_heads
    old = [
        torch.randn(1, num_kv_heads, case.cached, dim, device="cuda").bfloat16() for _ in range(2)
    ]
    new = [torch.randn(1, num_heads, count, dim, device="cuda").bfloat16() for _ in range(2)]
    folded = q.unflatten(1, (num_kv_heads, group)).transpose(0, 1).flatten(1, 2)[None].contiguous()
    queries = q.transpose(0, 1)[None].contiguous()
    attend = torch.ops.aten._scaled_dot_product_flash_attention

    def run() -> object:
        return (
            attend(folded, *old, 0.0, False, False, scale=dim**-0.5),
            attend(queries, *new, 0.0, True, False, scale=dim**-0.5),
        )

    return run


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Times of both ways by format; the one planned is drawn full."""
    keys = list(dict.fromkeys((row["geometry"], row["requests"], row["new"]) for row in rows))
    columns = len(CASES)
    figure, axes = panels(-(-len(keys) // columns), columns, (3.4 * columns, 6))
    for axis, key in zip(axes.flat, keys, strict=False):
        chosen = [row for row in rows if (row["geometry"], row["requests"], row["new"]) == key]
        labels = list(dict.fromkeys(row["prefix"] for row in chosen))
        for offset, way in ((-0.2, "rows"), (0.2, "tiles"), (0.0, "dense")):
            for row in chosen:
                if row["way"] == way:
                    place, color = labels.index(row["prefix"]) + offset, f"C{offset > 0:d}"
                    alpha = 1.0 if row["planned"] or way == "dense" else 0.4
                    color = "grey" if way == "dense" else color
                    axis.bar(place, row["us"], 0.4, color=color, alpha=alpha)
        axis.set(title=f"{key[0]}: {key[1]} x {key[2]:,} new tokens", ylabel="µs", yscale="log")
        axis.set_xticks(range(len(labels)), labels, fontsize=7)
    figure.suptitle("blue: rows of decode kernels, orange: expanded tiles; pale: not planned")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
