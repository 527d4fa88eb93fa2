"""Decode attention on a GPU over TQ, FP8 and BF16 pages, beside FlashInfer's best paths.

Two geometries, A = 24 query heads / 4 KV heads / head dim 256 and B = 32 / 8 / 128, 64-token pages
in random places. A time is the median of CUDA-graph replays; a graph holds several calls over
different pages, more than the cache holds. Our times are everything from unrotated queries to the
output: rotation and quantisation of the queries, attention, merge of the partials, inverse
rotation.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Claim, Record, format_claims, format_table

from minima_kernels import (
    GRANULE,
    KVGeometry,
    PageKind,
    Rotation,
    RouteCounters,
    Segment,
    parse_format,
    plan_decode,
    run_decode,
)
from minima_kernels.shares import write_shares

GEOMETRIES = {"A": (24, 4, 256), "B": (32, 8, 128)}
SHAPES = ((2, 59008), (32, 32256), (64, 8192))
LARGE = ((32, 32256), (64, 8192))
PAGE = 64
# Bytes read in one replay: many times the cache.
MIN_REPLAY_BYTES = 1.2e9
MAX_SETS = 12
# The canary of the Minima-KV paper: 10 FP8 and 23 TQ3 pages of every 33.
CANARY = (10, 33)

Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument("--formats", nargs="+", default=["tq3", "tq(16,4)", "fp8", "bf16"])
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    record = Record("decode_attention")
    record.machine |= gpu_facts()
    rows = ceilings(arguments.rounds)
    for name in arguments.geometries:
        for shape in SHAPES:
            for format_ in arguments.formats:
                rows += own(name, shape, format_, arguments.rounds)
            if shape == SHAPES[0] and "tq3" in arguments.formats:
                rows += canary(name, shape, arguments.rounds)
            if arguments.peers:
                rows += peers(name, shape, arguments.rounds)
            print(format_table(rows[-12:], COLUMNS), flush=True)
    claims = make_claims(rows)
    print(format_table(rows, COLUMNS))
    print(format_claims(claims))
    print(record.write(rows, claims, draw(rows) if arguments.plot else None, arguments.output))


COLUMNS = {"geometry": "", "batch": "", "tokens": "", "method": "", "us": ".1f", "us_min": ".1f",
           "us_max": ".1f", "gb_per_s": ".0f"}  # fmt: skip


def gpu_facts() -> dict[str, Any]:
    """The GPU and what runs it."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def time_graph(calls: Sequence[Call], rounds: int) -> tuple[float, float, float]:
    """Median, least and largest microseconds of one call, all calls in one CUDA graph."""
    stream = torch.cuda.Stream()
    count = max(len(calls), 4)
    times = []
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            held = [calls[i % len(calls)]() for i in range(count)]
        for _ in range(3):
            graph.replay()
        for _ in range(rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / count)
    del held
    return statistics.median(times), min(times), max(times)


def num_sets(num_bytes: int) -> int:
    """Input sets to rotate."""
    return max(1, min(MAX_SETS, math.ceil(MIN_REPLAY_BYTES / num_bytes)))


def row(
    geometry: str,
    shape: tuple[int, int],
    method: str,
    times: tuple[float, float, float],
    num_bytes: int,
) -> dict[str, Any]:
    median, least, largest = times
    return {
        "geometry": geometry,
        "batch": shape[0],
        "tokens": shape[1],
        "method": method,
        "us": median,
        "us_min": least,
        "us_max": largest,
        "read_bytes": num_bytes,
        "gb_per_s": num_bytes / median * 1e-3,
    }


def ceilings(rounds: int) -> list[dict[str, Any]]:
    """What the memory gives: a copy, and a sum that only reads."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    words = source.view(torch.int32).view(-1, 1 << 20)
    times = time_graph([lambda: torch.sum(words, 1, dtype=torch.int32)], rounds)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    copies = []
    for _ in range(rounds):
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        copies.append(start.elapsed_time(stop) * 1e3)
    copy = statistics.median(copies), min(copies), max(copies)
    size = source.numel()
    return [
        row("-", (1, 0), "read: torch.sum", times, size),
        row("-", (1, 0), "copy, read and write", copy, 2 * size),
    ]


class Inputs:
    """Arenas with pages of some kinds in random places, the same places in all of them."""

    def __init__(self, geometry: KVGeometry, formats: Sequence[str], counts: Sequence[int]) -> None:
        self.geometry = geometry
        self.kinds = [PageKind.uniform(name, parse_format(name), 1) for name in formats]
        sizes = [kind.granules(geometry) for kind in self.kinds]
        self.read_bytes = sum(
            kind.formats[0].layer_bytes(geometry) * count
            for kind, count in zip(self.kinds, counts, strict=True)
        )
        total = sum(size * count for size, count in zip(sizes, counts, strict=True)) * GRANULE
        self.addresses: list[torch.Tensor] = []
        start = 0
        for size, count in zip(sizes, counts, strict=True):
            self.addresses.append(torch.randperm(count) * size + start)
            start += size * count
        self.arenas = [
            torch.empty(total, dtype=torch.uint8, device="cuda")
            for _ in range(num_sets(self.read_bytes))
        ]
        for kind, addresses in zip(self.kinds, self.addresses, strict=True):
            self._fill(kind, addresses.cuda())

    def _fill(self, kind: PageKind, addresses: torch.Tensor) -> None:
        """Random content: some pages are encoded and used again and again."""
        geometry, format_ = self.geometry, kind.formats[0]
        shape = 128, PAGE, geometry.num_kv_heads, geometry.head_dim
        k, v = (torch.randn(shape, device="cuda") for _ in range(2))
        data = format_.encode(k, v, geometry)
        for part in addresses.split(len(data)):
            write_shares(self.arenas[0], part, format_, 0, geometry, data[: len(part)])
        for arena in self.arenas[1:]:
            arena.copy_(self.arenas[0])


def calls(
    inputs: Inputs,
    segments: Sequence[Segment],
    q: torch.Tensor,
    query_bits: int = 15,
    page_mass: bool = False,
) -> list[Call]:
    """One whole decode per input set."""
    geometry = inputs.geometry
    plan = plan_decode(segments, len(q), inputs.kinds, geometry, q.device, query_bits=query_bits)
    rotation = Rotation(geometry.head_dim, device=q.device)
    routes = RouteCounters()

    def call(arena: torch.Tensor) -> object:
        return run_decode(
            plan,
            q,
            arena,
            0,
            geometry.head_dim**-0.5,
            page_mass=page_mass,
            rotation=rotation,
            routes=routes,
        )

    call(inputs.arenas[0])
    assert [route.route for route in routes.snapshot()] == ["cuda"], routes.snapshot()
    return [partial(call, arena) for arena in inputs.arenas]


def own(name: str, shape: tuple[int, int], format_: str, rounds: int) -> list[dict[str, Any]]:
    """Our kernels over pages of one format."""
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    batch, tokens = shape
    pages = tokens // PAGE
    inputs = Inputs(KVGeometry(1, num_kv_heads, dim, PAGE), [format_], [batch * pages])
    segments = [
        Segment(part, 0, PAGE, [request])
        for request, part in enumerate(inputs.addresses[0].split(pages))
    ]
    q = torch.randn(batch, num_heads, dim, device="cuda").bfloat16()
    rows = []
    options: list[tuple[str, int, bool]] = [("", 15, False)]
    if format_.startswith("tq"):
        options += [(" q8", 8, False)]
    if format_ in ("tq3", "fp8"):
        options += [(" page mass", 15, True)]
    for suffix, bits, mass in options:
        times = time_graph(calls(inputs, segments, q, bits, mass), rounds)
        rows.append(row(name, shape, f"{format_}{suffix}", times, inputs.read_bytes))
    return rows


def canary(name: str, shape: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """FP8 and TQ3 pages mixed in the proportion of the paper's canary run."""
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    batch, tokens = shape
    pages = tokens // PAGE
    fp8 = round(pages * CANARY[0] / CANARY[1])
    counts = batch * fp8, batch * (pages - fp8)
    inputs = Inputs(KVGeometry(1, num_kv_heads, dim, PAGE), ["fp8", "tq3"], counts)
    segments = []
    for kind, part_pages in enumerate((fp8, pages - fp8)):
        parts = inputs.addresses[kind].split(part_pages)
        segments += [Segment(part, kind, PAGE, [request]) for request, part in enumerate(parts)]
    q = torch.randn(batch, num_heads, dim, device="cuda").bfloat16()
    times = time_graph(calls(inputs, segments, q), rounds)
    return [row(name, shape, "canary fp8 + tq3", times, inputs.read_bytes)]


def peers(name: str, shape: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """FlashInfer's paths over BF16 and FP8 (scale 1) caches, where it is installed."""
    try:
        import flashinfer
    except ImportError:
        print("FlashInfer is not installed: no peers")
        return []
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    rows = []
    for kv_name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        rows += peers_over(name, shape, kv_name, dtype, flashinfer, rounds)
    return rows


def peers_over(
    name: str,
    shape: tuple[int, int],
    kv_name: str,
    dtype: torch.dtype,
    flashinfer: Any,
    rounds: int,
) -> list[dict[str, Any]]:
    """FlashInfer's paths over a cache of one dtype."""
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    batch, tokens = shape
    pages = tokens // PAGE
    q = torch.randn(batch, num_heads, dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    indices = torch.randperm(batch * pages, device="cuda").int()
    size = batch * tokens * num_kv_heads * dim * 2 * dtype.itemsize
    caches = []
    for _ in range(num_sets(size)):
        cache_shape = batch * pages, 2, PAGE, num_kv_heads, dim
        cache = torch.empty(cache_shape, dtype=dtype, device="cuda")
        block = torch.randn(256, *cache_shape[1:], device="cuda").to(dtype)
        for first in range(0, len(cache), len(block)):
            part = cache[first : first + len(block)]
            part.copy_(block[: len(part)])
        caches.append(cache)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    semaphores = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda").view(torch.uint32)
    lengths = torch.full((batch, 1), tokens, dtype=torch.uint32, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )

    def xqa(cache: torch.Tensor) -> object:
        return flashinfer.xqa(
            q.view(batch, 1, num_heads, dim), cache[:, 0], cache[:, 1],
            indices.view(batch, pages), lengths, out.view(batch, 1, num_heads, dim),
            workspace, semaphores, num_kv_heads, PAGE,
            q_scale=1.0, kv_scale=1.0, kv_layout="NHD",
        )  # fmt: skip

    def plan_fa2() -> None:
        indptr = (torch.arange(batch + 1) * pages).int()
        last = torch.full((batch,), PAGE, dtype=torch.int32)
        wrapper.plan(
            indptr, indices, last, num_heads, num_kv_heads, dim, PAGE,
            q_data_type=torch.bfloat16, kv_data_type=dtype,
        )  # fmt: skip

    def fa2(cache: torch.Tensor) -> object:
        return wrapper.run(q, cache, out=out)

    rows = []
    for method, function in (("xqa", xqa), ("fa2", fa2)):
        try:
            if method == "fa2":
                plan_fa2()
            times = time_graph([partial(function, cache) for cache in caches], rounds)
        except Exception as error:
            # A path that this build of FlashInfer lacks is a gap in the table, not an end.
            print(f"no FlashInfer {method} {kv_name} for {name} {shape}: {error!r:.300}")
            continue
        rows.append(row(name, shape, f"FlashInfer {method} {kv_name}", times, size))
    return rows


def make_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The targets of the issue, where the rows they need are there."""
    claims = []
    for name in GEOMETRIES:
        for shape in SHAPES:
            case = {
                item["method"]: item
                for item in rows
                if (item["geometry"], item["batch"], item["tokens"]) == (name, *shape)
            }
            label = f"{name} {shape[0]}x{shape[1]}"
            peers_of = {
                kv: min(
                    (item["us"] for method, item in case.items()
                     if method.startswith("FlashInfer") and method.endswith(kv)),
                    default=None,
                )
                for kv in ("fp8", "bf16")
            }  # fmt: skip
            for kv, limit in (("fp8", 2.0), ("bf16", 3.0)):
                if "tq3" in case and peers_of[kv]:
                    ratio = peers_of[kv] / case["tq3"]["us"]
                    claims.append(
                        Claim.at_least(f"{label}: TQ3 over best {kv} peer", ratio, limit, "x")
                    )
            if "canary fp8 + tq3" in case and peers_of["fp8"]:
                ratio = peers_of["fp8"] / case["canary fp8 + tq3"]["us"]
                claims.append(
                    Claim.at_least(f"{label}: canary over best fp8 peer", ratio, 1.5, "x")
                )
            if "fp8" in case and shape in LARGE:
                rate = case["fp8"]["gb_per_s"] / 1000
                claims.append(Claim.at_least(f"{label}: our FP8", rate, 4.1, "TB/s"))
            if "tq3 page mass" in case:
                extra = (case["tq3 page mass"]["us"] / case["tq3"]["us"] - 1) * 100
                claims.append(Claim.at_most(f"{label}: page mass on", extra, 4, "%"))
    return claims


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Time per decode, a panel per geometry and shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(
        dict.fromkeys((r["geometry"], r["batch"], r["tokens"]) for r in rows if r["tokens"])
    )
    figure, axes = pyplot.subplots(1, len(cases), figsize=(4 * len(cases), 4), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        chosen = [r for r in rows if (r["geometry"], r["batch"], r["tokens"]) == case]
        colours = ["C1" if r["method"].startswith("FlashInfer") else "C0" for r in chosen]
        axis.barh([r["method"] for r in chosen], [r["us"] for r in chosen], color=colours)
        axis.set(title=f"{case[0]}: {case[1]} x {case[2]:,} tokens", xlabel="µs")
        axis.invert_yaxis()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
