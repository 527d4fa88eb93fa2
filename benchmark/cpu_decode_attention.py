"""Decode attention on the CPU: native kernels over page formats against torch over dense KV.

    python benchmark/cpu_decode_attention.py

One decode step of one request over distinct KV per layer, so that only compressed caches come near
the size of the processor's; then a cohort of 16 requests on one shared prefix, read once for all
against once for each. With one thread (the default) times are CPU times of that thread, the least
of several rounds in which all methods take turns: on a busy machine ratios hold better than wall
times. Attention is native (integer) over TQ pages and float32 over the others; torch's dense KV is
contiguous, with the query heads of a KV head folded into the query axis.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from common import Claim, Record, format_claims, format_table

from minima_kernels import (
    GRANULE,
    KVGeometry,
    PageKind,
    Segment,
    parse_format,
    plan_decode,
    run_decode,
    use_huge_pages,
)
from minima_kernels.arena import scatter
from minima_kernels.cpu.library import current_level

FORMATS = ("tq3", "tq(16,4)", "tq(5,5)", "fp8", "bf16", "f32")
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
PAGE_SIZE = 64
READERS = 16
# Bytes of float32 KV that a case may take; longer contexts get fewer layers.
MAX_DENSE_BYTES = 1 << 29

Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--cohort-tokens", type=int, nargs="+", default=[1536, 8192])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record = Record("cpu_decode_attention")
    record.machine["native_level"] = current_level()
    record.machine["threads"] = arguments.threads
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter

    rows = []
    for group_size, heads, dim in ((3, 3, 64), (4, 8, 128)):
        for tokens in arguments.tokens:
            rows += single(tokens, heads, group_size, dim, clock, arguments.rounds)
        for tokens in arguments.cohort_tokens:
            rows += cohort(tokens, heads, group_size, dim, clock, arguments.rounds)
    claims = make_claims(rows)
    columns = {"shape": "", "tokens": "", "readers": "", "method": "", "layers": "",
               "ms_per_step": ".2f", "ns_per_token_head": ".2f", "gb_per_s": ".1f"}  # fmt: skip
    print(format_table(rows, columns))
    print(format_claims(claims))
    print(record.write(rows, claims, draw(rows)))


def single(
    tokens: int, heads: int, group_size: int, dim: int, clock: Callable[[], float], rounds: int
) -> list[dict[str, Any]]:
    """One request: all formats natively, and the ways to do it in torch."""
    layers = min(30, max(1, MAX_DENSE_BYTES // (tokens * heads * dim * 2 * 4)))
    geometry = KVGeometry(layers, heads, dim, PAGE_SIZE)
    q = torch.randn(layers, 1, heads * group_size, dim)
    steps: dict[str, tuple[Step, int]] = {}
    for name in FORMATS:
        arena, kind, addresses = make_pages(geometry, name, tokens)
        segments = [Segment(addresses, 0, PAGE_SIZE, [0])]
        steps[f"native {name}"] = native_step(q, arena, kind, geometry, segments), arena.numel()
    for name, dtype in DTYPES.items():
        k, v = (dense_cache((layers, 1, heads, tokens, dim), dtype) for _ in range(2))
        folded = q.view(layers, 1, heads, group_size, dim).to(dtype)
        size = 2 * k.numel() * k.element_size()
        steps[f"torch sdpa {name}"] = partial(sdpa_step, folded, k, v), size
        steps[f"torch matmul {name}"] = partial(matmul_step, folded, k, v), size
    return measure(steps, geometry, group_size, tokens, 1, "", clock, rounds)


def cohort(
    tokens: int, heads: int, group_size: int, dim: int, clock: Callable[[], float], rounds: int
) -> list[dict[str, Any]]:
    """Sixteen requests on one prefix: read once for all, and once for each."""
    layers = min(30, max(1, MAX_DENSE_BYTES // 4 // (tokens * heads * dim * 2 * 4)))
    geometry = KVGeometry(layers, heads, dim, PAGE_SIZE)
    q = torch.randn(layers, READERS, heads * group_size, dim)
    everyone = list(range(READERS))
    rows = []
    for name in ("tq3", "fp8", "bf16"):
        arena, kind, addresses = make_pages(geometry, name, tokens)
        shared = [Segment(addresses, 0, PAGE_SIZE, everyone)]
        apart = [Segment(addresses, 0, PAGE_SIZE, [reader]) for reader in everyone]
        steps = {
            f"native {name} once": (native_step(q, arena, kind, geometry, shared), arena.numel()),
            f"native {name} each": (
                native_step(q, arena, kind, geometry, apart),
                READERS * arena.numel(),
            ),
        }
        rows += measure(steps, geometry, group_size, tokens, READERS, name, clock, rounds)
    return rows


def dense_cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random keys or values in memory of the same sort as the arena's."""
    cache = torch.empty(shape, dtype=dtype)
    use_huge_pages(cache)
    return cache.normal_()


def make_pages(
    geometry: KVGeometry, name: str, tokens: int
) -> tuple[torch.Tensor, PageKind, torch.Tensor]:
    """An arena with the pages of one request in random places."""
    kind = PageKind.uniform(name, parse_format(name), geometry.num_layers)
    num_pages = tokens // geometry.page_size
    granules = kind.granules(geometry)
    arena = torch.empty(num_pages * granules * GRANULE, dtype=torch.uint8)
    use_huge_pages(arena)  # as the server does
    addresses = torch.randperm(num_pages) * granules
    shape = num_pages, geometry.page_size, geometry.num_kv_heads, geometry.head_dim
    format_ = kind.formats[0]
    data = format_.encode(torch.randn(shape), torch.randn(shape), geometry)
    for layer in range(geometry.num_layers):
        scatter(arena, addresses, kind.layer_offset(layer, geometry), data)
    return arena, kind, addresses


def native_step(
    q: torch.Tensor,
    arena: torch.Tensor,
    kind: PageKind,
    geometry: KVGeometry,
    segments: Sequence[Segment],
) -> Step:
    """All layers of one decode step; the plan is made once, as the server does per step."""
    plan = plan_decode(segments, q.shape[1], [kind], geometry, "cpu")
    scale = geometry.head_dim**-0.5

    def step() -> None:
        for layer in range(geometry.num_layers):
            run_decode(plan, q[layer], arena, layer, scale)

    return step


def sdpa_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for layer in range(q.shape[0]):
        torch.nn.functional.scaled_dot_product_attention(q[layer], k[layer], v[layer])


def matmul_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    scale = q.shape[-1] ** -0.5
    for layer in range(q.shape[0]):
        scores = torch.matmul(q[layer] * scale, k[layer].mT)
        torch.matmul(torch.softmax(scores, dim=-1), v[layer])


def measure(
    steps: dict[str, tuple[Step, int]],
    geometry: KVGeometry,
    group_size: int,
    tokens: int,
    readers: int,
    format_: str,
    clock: Callable[[], float],
    rounds: int,
) -> list[dict[str, Any]]:
    """The least time of each step, all of them taking turns."""
    best = dict.fromkeys(steps, float("inf"))
    with torch.inference_mode():
        for step, _ in steps.values():
            step()
        for _ in range(rounds):
            for name, (step, _) in steps.items():
                start = clock()
                step()
                best[name] = min(best[name], clock() - start)
    heads = geometry.num_kv_heads
    work = geometry.num_layers * tokens * heads
    return [
        {
            "shape": f"{heads * group_size}/{heads}/{geometry.head_dim}",
            "tokens": tokens,
            "readers": readers,
            "method": name,
            "format": format_ or name.split()[-1],
            "layers": geometry.num_layers,
            "ms_per_step": seconds * 1e3,
            "ns_per_token_head": seconds * 1e9 / work,
            "read_bytes": steps[name][1],
            "gb_per_s": steps[name][1] / seconds / 1e9,
        }
        for name, seconds in best.items()
    ]


def make_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The targets, for each shape: TQ3 against own BF16 and the best of torch; cohorts."""
    times = {
        (row["shape"], row["tokens"], row["readers"], row["method"]): row["ms_per_step"]
        for row in rows
    }
    claims = []
    for shape, tokens, readers in dict.fromkeys(key[:3] for key in times):
        case = {
            key[3]: value for key, value in times.items() if key[:3] == (shape, tokens, readers)
        }
        if readers == 1 and tokens == 8192:
            torch_best = min(value for name, value in case.items() if name.startswith("torch"))
            own = case["native bf16"] / case["native tq3"]
            best = torch_best / case["native tq3"]
            claims.append(Claim.at_least(f"{shape}: TQ3 over own BF16 at 8K", own, 1.5, "x"))
            claims.append(
                Claim.at_least(f"{shape}: TQ3 over the best of torch at 8K", best, 4, "x")
            )
        if readers > 1:
            for name in ("tq3", "fp8", "bf16"):
                gain = case[f"native {name} each"] / case[f"native {name} once"]
                what = f"{shape}: {name} shared by {readers} at {tokens}, once over each"
                claims.append(Claim.at_least(what, gain, 4, "x"))
    return claims


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Time per token and KV head over context length, one panel per shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    singles = [row for row in rows if row["readers"] == 1]
    shapes = list(dict.fromkeys(row["shape"] for row in singles))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(6.5 * len(shapes), 4.5), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for method in dict.fromkeys(row["method"] for row in singles):
            points = [row for row in singles if (row["shape"], row["method"]) == (shape, method)]
            style = "o-" if method.startswith("native") else "x--"
            axis.plot(
                [row["tokens"] for row in points],
                [row["ns_per_token_head"] for row in points],
                style,
                label=method,
            )
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ns per token and KV head")
        axis.set_title(f"decode attention, {shape} (query heads / KV heads / head dim)")
        axis.legend(fontsize=7)
    return figure


if __name__ == "__main__":
    main()
