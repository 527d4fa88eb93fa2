"""Decode attention on a GPU over pages that several requests share, beside FlashInfer's cascade.

Geometries, pages and timing are those of `decode_attention.py`: everything from unrotated queries
to the output, medians of CUDA-graph replays that read more than the cache holds. Cases: one prefix
of 32,256 tokens with 2 to 64 readers, without and with a private tail of 128 tokens each (FP8
pages), and a tree of 4 levels with fan-out 4, 2,048 tokens a node and 64 leaves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from common import Claim, add_output_options, format_table, panels
from gpu_pages import GEOMETRIES, PAGE, Inputs, calls
from gpu_timing import Call, draw_methods, find_flashinfer, gpu_record, num_sets, time_graph

from minima_kernels import KVGeometry, Segment
from minima_kernels.cuda import work

PREFIX_TOKENS = 32256
TAIL_TOKENS = 128
READERS = (2, 4, 8, 16, 32, 64)
TREE_LEVELS, FAN_OUT, NODE_TOKENS = 4, 4, 2048

# Microseconds of the prototypes, the better of one per request and a cohort (q8, prefix only).
PROTOTYPE = {"A": {2: 26.3, 4: 29.4, 8: 29.5, 16: 36.5}, "B": {2: 20.6, 4: 32.3, 8: 32.5, 16: 32.7}}
TARGETS = {"A": 52.0, "B": 44.0}
TARGET_READERS = 32

COLUMNS = {"geometry": "", "case": "", "method": "", "us": ".1f", "us_min": ".1f", "us_max": ".1f"}

Indices = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Nodes of a tree by level, each of so many pages; readers of a level split evenly."""

    name: str
    readers: int
    level_nodes: tuple[int, ...]
    node_pages: int
    tail_pages: int = 0

    @property
    def num_pages(self) -> int:
        return sum(self.level_nodes) * self.node_pages

    def nodes(self, pages: torch.Tensor) -> list[tuple[torch.Tensor, range]]:
        """Pages and readers of each node, level by level."""
        found = []
        parts = iter(pages.split(self.node_pages))
        for count in self.level_nodes:
            each = self.readers // count
            found += [(next(parts), range(i * each, (i + 1) * each)) for i in range(count)]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=15)
    add_output_options(parser)
    arguments = parser.parse_args()
    record = gpu_record("shared_prefix")
    rows: list[dict[str, Any]] = []
    for geometry in arguments.geometries:
        for case in cases():
            found = own(geometry, case, arguments.rounds)
            if arguments.peers and (case.tail_pages or len(case.level_nodes) > 1):
                found += peers(geometry, case, arguments.rounds)
            print(format_table(found, COLUMNS), flush=True)
            rows += found
    claims = make_claims(rows)
    record.finish(rows, claims, draw, arguments)


def cases() -> list[Case]:
    pages = PREFIX_TOKENS // PAGE
    prefixes = [Case(f"prefix, {count} readers", count, (1,), pages) for count in READERS]
    tails = Case("prefix, 32 readers, tails", 32, (1,), pages, TAIL_TOKENS // PAGE)
    nodes = tuple(FAN_OUT**level for level in range(TREE_LEVELS))
    return [*prefixes, tails, Case("tree, 64 leaves", nodes[-1], nodes, NODE_TOKENS // PAGE)]


def own(geometry: str, case: Case, rounds: int) -> list[dict[str, Any]]:
    """Our kernels over TQ3 and FP8 pages: as planned, and with every request reading its pages
    itself (over FP8 pages: every eight columns of query heads, which is less)."""
    num_heads, num_kv_heads, dim = GEOMETRIES[geometry]
    tails = case.readers * case.tail_pages
    inputs = Inputs(
        KVGeometry(1, num_kv_heads, dim, PAGE),
        ["tq3", "fp8"],
        [case.num_pages, case.num_pages + tails],
    )
    q = torch.randn(case.readers, num_heads, dim, device="cuda").bfloat16()
    fp8, tail_pages = inputs.addresses[1].split([case.num_pages, tails])
    private = [
        Segment(part, 1, PAGE, [row])
        for row, part in enumerate(tail_pages.split(max(1, case.tail_pages)))
    ]
    shared = [
        Segment(part, 0, PAGE, list(readers)) for part, readers in case.nodes(inputs.addresses[0])
    ]
    apart = [
        Segment(part, 0, PAGE, [row])
        for part, readers in case.nodes(inputs.addresses[0])
        for row in readers
    ]
    dense = [Segment(part, 1, PAGE, list(readers)) for part, readers in case.nodes(fp8)]
    rows = []
    for method, segments, bits in (
        ("tq3", shared, 15),
        ("tq3 q8", shared, 8),
        ("tq3 per request", apart, 15),
        ("fp8", dense, 15),
    ):
        times = time_graph(calls(inputs, [*segments, *private], q, bits), rounds)
        rows.append(row(geometry, case, method, times))
    never = work.FP8_RULE._replace(min_readers=case.readers + 1)
    with patch.object(work, "FP8_RULE", never):
        times = time_graph(calls(inputs, [*dense, *private], q), rounds)
        rows.append(row(geometry, case, "fp8 per request", times))
    return rows


def row(
    geometry: str, case: Case, method: str, times: tuple[float, float, float]
) -> dict[str, Any]:
    return {
        "geometry": geometry,
        "case": case.name,
        "readers": case.readers,
        "method": method,
        **dict(zip(("us", "us_min", "us_max"), times, strict=True)),
    }


def peers(geometry: str, case: Case, rounds: int) -> list[dict[str, Any]]:
    """FlashInfer: a cascade over the levels, and the best path per request, over the same pages."""
    flashinfer = find_flashinfer()
    if flashinfer is None:
        return []
    num_heads, num_kv_heads, dim = GEOMETRIES[geometry]
    total = case.num_pages + case.readers * case.tail_pages
    q = torch.randn(case.readers, num_heads, dim, device="cuda").bfloat16()
    pages = torch.randperm(total)
    rows = []
    for kv_name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        shape = total, 2, PAGE, num_kv_heads, dim
        size = total * 2 * PAGE * num_kv_heads * dim * dtype.itemsize
        block = torch.randn(shape, device="cuda").to(dtype)
        caches = [block.clone() for _ in range(num_sets(size))]
        for method, make in (("cascade", cascade), ("xqa", xqa)):
            try:
                call = make(flashinfer, case, q, pages, num_kv_heads, dtype)
                times = time_graph([partial(call, cache) for cache in caches], rounds)
            except Exception as error:
                # A path that this build of FlashInfer lacks is a gap in the table, not an end.
                print(f"no FlashInfer {method} {kv_name} for {geometry}: {error!r:.300}")
                continue
            rows.append(row(geometry, case, f"FlashInfer {method} {kv_name}", times))
    return rows


def cascade(
    flashinfer: Any,
    case: Case,
    q: torch.Tensor,
    pages: torch.Tensor,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> Any:
    """A run of the multi-level cascade, planned: a level per level of the tree, and the tails."""
    level_nodes, counts = list(case.level_nodes), [case.node_pages] * len(case.level_nodes)
    if case.tail_pages:
        level_nodes.append(case.readers)
        counts.append(case.tail_pages)
    parts = iter(
        pages.int().cuda().split([n * c for n, c in zip(level_nodes, counts, strict=True)])
    )
    rows_of, pages_of, indices, last = [], [], [], []
    for nodes, count in zip(level_nodes, counts, strict=True):
        steps = torch.arange(nodes + 1, dtype=torch.int32, device="cuda")
        rows_of.append(steps * (case.readers // nodes))
        pages_of.append(steps * count)
        indices.append(next(parts))
        last.append(torch.full((nodes,), PAGE, dtype=torch.int32, device="cuda"))
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(level_nodes), workspace, "NHD")
    wrapper.plan(
        rows_of, pages_of, indices, last, q.shape[1], num_kv_heads, q.shape[2], PAGE,
        q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    return partial(wrapper.run, q)


def xqa(
    flashinfer: Any,
    case: Case,
    q: torch.Tensor,
    pages: torch.Tensor,
    num_kv_heads: int,
    dtype: torch.dtype,
) -> Call:
    """XQA, each request with the pages of its path."""
    batch, num_heads, dim = q.shape
    shared, tails = pages.split([case.num_pages, len(pages) - case.num_pages])
    paths: list[Indices] = [[] for _ in range(batch)]
    for part, readers in case.nodes(shared):
        for reader in readers:
            paths[reader].append(part)
    if case.tail_pages:
        for path, part in zip(paths, tails.split(case.tail_pages), strict=True):
            path.append(part)
    table = torch.stack([torch.cat(path) for path in paths]).int().cuda()
    lengths = torch.full((batch, 1), table.shape[1] * PAGE, dtype=torch.uint32, device="cuda")
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    semaphores = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda").view(torch.uint32)
    out = torch.empty(batch, 1, num_heads, dim, dtype=torch.bfloat16, device="cuda")

    def call(cache: torch.Tensor) -> object:
        return flashinfer.xqa(
            q.view(batch, 1, num_heads, dim), cache[:, 0], cache[:, 1], table, lengths, out,
            workspace, semaphores, num_kv_heads, PAGE, q_scale=1.0, kv_scale=1.0, kv_layout="NHD",
        )  # fmt: skip

    return call


def make_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The targets, where the rows they need are there."""
    times = {(item["geometry"], item["case"], item["method"]): item["us"] for item in rows}
    claims = []
    for geometry in dict.fromkeys(item["geometry"] for item in rows):
        for case in cases():
            own_times = {
                m: us for (g, c, m), us in times.items() if (g, c) == (geometry, case.name)
            }
            label = f"{geometry}, {case.name}"
            if len(case.level_nodes) > 1:
                # All of FlashInfer's paths, and own FP8 pages that each request reads for itself.
                peers = [us for m, us in own_times.items() if m.startswith("FlashInfer")]
                ratio = min([*peers, own_times["fp8 per request"]]) / own_times["tq3"]
                claims.append(Claim.at_least(f"{label}: over best FP8 or cascade", ratio, 2, "x"))
                continue
            ratio = own_times["fp8 per request"] / own_times["fp8"]
            # Where both are the same kernel, they differ by chance.
            claims.append(Claim.at_least(f"{label}: FP8 over per request", ratio, 0.98, "x"))
            if case.readers > max(PROTOTYPE[geometry]) and case.readers != TARGET_READERS:
                continue
            limit = PROTOTYPE[geometry].get(case.readers, TARGETS[geometry])
            for method in ("tq3", "tq3 q8"):
                us = own_times[method]
                claims.append(Claim.at_most(f"{label}: {method}", us, limit, "us"))
    return claims


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Time by the number of readers, and of the other cases."""
    geometries = list(dict.fromkeys(item["geometry"] for item in rows))
    others = [case for case in cases() if case.tail_pages or len(case.level_nodes) > 1]
    figure, axes = panels(len(geometries), 1 + len(others), (15, 4 * len(geometries)))
    for line, geometry in zip(axes, geometries, strict=True):
        mine = [item for item in rows if item["geometry"] == geometry]
        names = [case.name for case in cases() if case not in others]
        for method in ("tq3", "tq3 q8", "tq3 per request", "fp8", "fp8 per request"):
            chosen = [r for r in mine if r["method"] == method and r["case"] in names]
            line[0].plot(
                [r["readers"] for r in chosen], [r["us"] for r in chosen], "o-", label=method
            )
        line[0].set(title=f"{geometry}: {PREFIX_TOKENS:,} shared tokens", xlabel="readers")
        line[0].set(ylabel="µs", xscale="log", yscale="log")
        line[0].set_xticks(READERS, [str(count) for count in READERS])
        line[0].minorticks_off()
        line[0].legend()
        for axis, case in zip(line[1:], others, strict=True):
            chosen = [r for r in mine if r["case"] == case.name]
            draw_methods(axis, chosen, f"{geometry}: {case.name}")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
