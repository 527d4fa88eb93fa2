"""Attention of new tokens over a long cached prefix on a GPU, by the format of the prefix.

One layer, one request: 512 and 4,096 new tokens over 32,768 cached ones, everything from unrotated
queries to the output. The yardsticks: the same over BF16 pages, and torch's flash attention over a
dense BF16 prefix that lies ready. Geometries A = 24 query heads / 4 KV heads / head dim 256,
B = 32 / 8 / 128.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import Claim, add_output_options, format_table, panels
from gpu_pages import GEOMETRIES, PAGE, Inputs
from gpu_timing import gpu_record, time_events

from minima_kernels import KVGeometry, Rotation, RouteCounters, Segment, plan_extend, run_extend
from minima_kernels.routes import Route

PREFIX_TOKENS = 32768
NEW_TOKENS = (512, 4096)
FORMATS = ("bf16", "fp8", "tq3", "tq(16,4)")
TARGET = 1.1

COLUMNS = {"geometry": "", "new": "", "prefix": "", "us": ".0f", "over_bf16": ".2f"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument("--rounds", type=int, default=9)
    add_output_options(parser)
    arguments = parser.parse_args()
    record = gpu_record("extend")
    rows: list[dict[str, Any]] = []
    for name in arguments.geometries:
        for count in NEW_TOKENS:
            found = measure(name, count, arguments.rounds)
            print(format_table(found, COLUMNS), flush=True)
            rows += found
    claims = [
        Claim.at_most(
            f"{row['geometry']}: {row['new']} new tokens over {row['prefix']}, over BF16 pages",
            row["over_bf16"], TARGET, "x",
        )
        for row in rows
        if row["prefix"] in ("fp8", "tq3", "tq(16,4)")
    ]  # fmt: skip
    record.finish(rows, claims, draw, arguments)


def measure(name: str, count: int, rounds: int) -> list[dict[str, Any]]:
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    geometry, pages = KVGeometry(1, num_kv_heads, dim, PAGE), PREFIX_TOKENS // PAGE
    q = torch.randn(count, num_heads, dim, device="cuda").bfloat16()
    k, v = (torch.randn(count, num_kv_heads, dim, device="cuda").bfloat16() for _ in range(2))
    rotation = Rotation(dim, device="cuda")
    times: dict[str, float] = {}
    for format_ in FORMATS:
        inputs = Inputs(geometry, [format_], [pages])
        arena = inputs.arenas[0]
        routes = RouteCounters()
        plan = plan_extend(
            [Segment(inputs.addresses[0], 0, PAGE, [0])], [0, count], inputs.kinds, geometry, "cuda"
        )

        run = partial(
            run_extend,
            plan,
            q,
            k,
            v,
            arena,
            0,
            dim**-0.5,
            rotation=rotation,
            routes=routes,
        )
        times[format_] = time_events(run, rounds) * 1e3
        assert Route("extend", "flash", "") in routes.snapshot(), routes.snapshot()
    times["dense"] = time_events(dense(q, num_kv_heads), rounds) * 1e3
    return [
        {
            "geometry": name,
            "new": count,
            "prefix": format_,
            "us": us,
            "over_bf16": us / times["bf16"],
        }
        for format_, us in times.items()
    ]


def dense(q: torch.Tensor, num_kv_heads: int) -> Any:
    """Flash attention over a dense prefix and, causally, the new tokens themselves."""
    count, num_heads, dim = q.shape
    group = num_heads // num_kv_heads
    old = [
        torch.randn(1, num_kv_heads, PREFIX_TOKENS, dim, device="cuda").bfloat16() for _ in range(2)
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
    """Time over that of BF16 pages."""
    keys = list(dict.fromkeys((row["geometry"], row["new"]) for row in rows))
    figure, axes = panels(1, len(keys), (4 * len(keys), 3.5))
    for axis, key in zip(axes[0], keys, strict=True):
        chosen = [row for row in rows if (row["geometry"], row["new"]) == key]
        axis.bar([row["prefix"] for row in chosen], [row["us"] for row in chosen])
        axis.set(title=f"{key[0]}: {key[1]:,} new tokens", ylabel="µs")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
