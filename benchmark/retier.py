"""Conversion of whole pages between formats on a GPU: sealing, retiering, promotion.

Pages of all layers are converted in batches as the cache controller does it, in random places.
Bytes are those read and written; the yardstick is a large copy on the same device, counted the
same way. Geometries: A = 4 KV heads / head dim 256 / 16 layers, B = 8 / 128 / 32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from common import Claim, add_output_options, format_table, panels
from gpu_timing import gpu_record, time_events

from minima_kernels import GRANULE, KVGeometry, PageKind, RouteCounters, parse_format, retier
from minima_kernels.cpu.route import torch_only

GEOMETRIES = {"A": KVGeometry(16, 4, 256, 64), "B": KVGeometry(32, 8, 128, 64)}
CONVERSIONS = (
    ("bf16", "fp8"), ("bf16", "tq3"), ("fp8", "tq3"), ("fp8", "tq(16,4)"), ("tq3", "fp8"),
    ("tq3", "tq(4,4)"),
)  # fmt: skip
NUM_PAGES = 256
TARGET = 0.5  # of the rate of a copy

COLUMNS = {"geometry": "", "conversion": "", "route": "", "ms": ".3f", "gb_per_s": ".0f",
           "of_copy": ".2f"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument("--rounds", type=int, default=9)
    add_output_options(parser)
    arguments = parser.parse_args()
    record = gpu_record("retier")
    copy_rate = measure_copy(arguments.rounds)
    print(f"copy, read and write: {copy_rate:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for name in arguments.geometries:
        for source, destination in CONVERSIONS:
            rows += convert(name, source, destination, copy_rate, arguments.rounds)
        print(format_table(rows, COLUMNS), flush=True)
    claims = [
        Claim.at_least(
            f"{row['geometry']}: {row['conversion']}, share of the copy rate", row["of_copy"],
            TARGET, "",
        )
        for row in rows
        if row["route"] == "cuda"
    ]  # fmt: skip
    record.finish(rows, claims, draw, arguments)


def measure_copy(rounds: int) -> float:
    """GB/s of a copy of 2 GiB, read and written bytes together."""
    source = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / time_events(lambda: target.copy_(source), rounds) * 1e-6


def convert(
    name: str, source: str, destination: str, copy_rate: float, rounds: int
) -> list[dict[str, Any]]:
    geometry = GEOMETRIES[name]
    kinds = [
        PageKind.uniform(f, parse_format(f), geometry.num_layers) for f in (source, destination)
    ]
    start = PageKind.uniform("bf16", parse_format("bf16"), geometry.num_layers)
    sizes = [kind.granules(geometry) for kind in (start, *kinds)]
    bases = [0, NUM_PAGES * sizes[0], NUM_PAGES * (sizes[0] + sizes[1])]
    places = [
        (base + torch.randperm(NUM_PAGES) * size).cuda()
        for base, size in zip(bases, sizes, strict=True)
    ]
    arena = torch.empty(NUM_PAGES * sum(sizes) * GRANULE, dtype=torch.uint8, device="cuda")
    values = arena[: NUM_PAGES * sizes[0] * GRANULE].view(torch.bfloat16)
    values.normal_()
    routes = RouteCounters()
    if source == "bf16":
        places[1] = places[0]
    else:
        retier(arena, places[0], start, places[1], kinds[0], geometry, routes=routes)

    def run() -> None:
        retier(arena, places[1], kinds[0], places[2], kinds[1], geometry, routes=routes)

    moved = sum(
        sum(format_.layer_bytes(geometry) for format_ in kind.formats) for kind in kinds
    )  # fmt: skip
    rows = []
    for route, count in (("cuda", rounds), ("torch", 1)):
        if route == "cuda":
            milliseconds = time_events(run, count)
            assert {found.route for found in routes.snapshot()} == {"cuda"}
        else:
            with torch_only():
                milliseconds = time_events(run, count)
        rate = moved * NUM_PAGES / milliseconds * 1e-6
        rows.append(
            {
                "geometry": name,
                "conversion": f"{source} to {destination}",
                "route": route,
                "pages": NUM_PAGES,
                "ms": milliseconds,
                "gb_per_s": rate,
                "of_copy": rate / copy_rate,
            }
        )
    return rows


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Share of the copy rate by conversion."""
    geometries = list(dict.fromkeys(row["geometry"] for row in rows))
    figure, axes = panels(1, len(geometries), (7 * len(geometries), 4))
    for axis, geometry in zip(axes[0], geometries, strict=True):
        mine = [row for row in rows if row["geometry"] == geometry]
        for place, route in enumerate(("cuda", "torch")):
            chosen = [row for row in mine if row["route"] == route]
            steps = [index + 0.4 * place for index in range(len(chosen))]
            axis.barh(steps, [row["of_copy"] for row in chosen], 0.38, label=route)
        axis.set_yticks(range(len(CONVERSIONS)), [f"{a} to {b}" for a, b in CONVERSIONS])
        axis.axvline(TARGET, color="grey", linestyle=":")
        axis.set(
            title=f"{geometry}: conversion of pages", xlabel="bytes per second / those of a copy"
        )
        axis.invert_yaxis()
        axis.legend()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
