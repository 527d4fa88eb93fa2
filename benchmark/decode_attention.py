"""Decode attention on a GPU over TQ, FP8 and BF16 pages, beside FlashInfer's best paths.

Two geometries, A = 24 query heads / 4 KV heads / head dim 256 and B = 32 / 8 / 128, 64-token pages
in random places. A time is the median of CUDA-graph replays; a graph holds several calls over
different pages, more than the cache holds. Our times are everything from unrotated queries to the
output: rotation and quantisation of the queries, attention, merge of the partials, inverse
rotation.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import Claim, add_output_options, format_table, panels
from gpu_pages import GEOMETRIES, PAGE, Inputs, calls
from gpu_timing import draw_methods, find_flashinfer, gpu_record, num_sets, time_graph

from minima_kernels import KVGeometry

SHAPES = ((2, 59008), (32, 32256), (64, 8192))
LARGE = ((32, 32256), (64, 8192))
# The canary of the Minima-KV paper: 10 FP8 and 23 TQ3 pages of every 33.
CANARY = (10, 33)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometries", nargs="+", default=list(GEOMETRIES), choices=GEOMETRIES)
    parser.add_argument("--formats", nargs="+", default=["tq3", "tq(16,4)", "fp8", "bf16"])
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=15)
    add_output_options(parser)
    arguments = parser.parse_args()
    record = gpu_record("decode_attention")
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
    record.finish(rows, claims, draw, arguments)


COLUMNS = {"geometry": "", "batch": "", "tokens": "", "method": "", "us": ".1f", "us_min": ".1f",
           "us_max": ".1f", "gb_per_s": ".0f"}  # fmt: skip


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


def own(name: str, shape: tuple[int, int], format_: str, rounds: int) -> list[dict[str, Any]]:
    """Our kernels over pages of one format."""
    num_heads, num_kv_heads, dim = GEOMETRIES[name]
    batch, tokens = shape
    pages = tokens // PAGE
    inputs = Inputs(KVGeometry(1, num_kv_heads, dim, PAGE), [format_], [batch * pages])
    segments = inputs.segments(0, pages)
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
    segments = [*inputs.segments(0, fp8), *inputs.segments(1, pages - fp8)]
    q = torch.randn(batch, num_heads, dim, device="cuda").bfloat16()
    times = time_graph(calls(inputs, segments, q), rounds)
    return [row(name, shape, "canary fp8 + tq3", times, inputs.read_bytes)]


def peers(name: str, shape: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """FlashInfer's paths over BF16 and FP8 (scale 1) caches, where it is installed."""
    flashinfer = find_flashinfer()
    if flashinfer is None:
        return []
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
    cases = list(
        dict.fromkeys((r["geometry"], r["batch"], r["tokens"]) for r in rows if r["tokens"])
    )
    figure, axes = panels(1, len(cases), (4 * len(cases), 4))
    for axis, case in zip(axes[0], cases, strict=True):
        chosen = [r for r in rows if (r["geometry"], r["batch"], r["tokens"]) == case]
        draw_methods(axis, chosen, f"{case[0]}: {case[1]} x {case[2]:,} tokens")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
