"""Tree search (tree of thoughts): 64 leaves over three shared levels, on the real engine.

    python benchmark/tree_search.py

A question of 256 tokens; thoughts of 56 tokens, which with the 8 that the program writes before
each fill a page; 4 first thoughts are sampled from it, 4 second thoughts from each
of those and 4 third thoughts from each of these: 84 requests, 64 of them leaves that run at once.
Every level is submitted together, as a search program does, and waits for the level before it.

- shared: the prefix cache is on, and a decode step reads each shared run of pages once for all.
- own reads: the cache is on, but the plan gives every request its own copy of the work: each
  shared run is read once per request (what a paged cache without shared reads does).
- no cache: --disable-radix-cache; every request computes and stores its whole path.

The three run one after another in one process, over the same model.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from common import Claim, Record, format_claims, format_table

from minima_kernels.attention.segments import SegmentTable, offsets, ranges
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.messages import GenerateRequest, TokenOutput
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner import batch
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.server_args import ServerArgs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = 3
SUFFIX_TOKENS = 8
"""Tokens that the search program writes between two thoughts, other ones for each branch."""


class Shape(NamedTuple):
    """Size of the search."""

    branching: int
    prompt_tokens: int
    thought_tokens: int

    @property
    def leaves(self) -> int:
        return int(self.branching**LEVELS)


class Row(NamedTuple):
    """One search in one mode."""

    mode: str
    leaves: int
    total_s: float
    leaf_level_s: float
    leaf_step_ms: float
    """Median decode step with all leaves running."""
    prompt_tokens: int
    computed_tokens: int
    pages_read: int
    """Pages that the batches of the leaf level read in one layer, all together."""
    kv_bytes: int
    """Bytes of the pages in use when the leaves end (the open pages of the leaves included)."""


class Search:
    """An engine in this process that runs one search."""

    def __init__(self, runner: ModelRunner, shape: Shape, cached: bool) -> None:
        self._args = ServerArgs(
            disable_radix_cache=not cached,
            random_seed=1,
            max_running_requests=shape.leaves,
            kv_cache_memory=2 << 30,
        )
        arena = runner.allocate(self._args)
        runner.attach(arena)
        self.cache = PrefixCache(self._args, arena)
        self.scheduler = Scheduler(self._args, runner, self.cache, None, frozenset(), self._take)
        self.tokens: dict[str, list[int]] = {}
        self.step_s: list[float] = []
        """Of steps in which every request of the level decoded."""
        self.kv_bytes = 0

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.rid, []).extend(output.new_ids)

    def level(self, prompts: list[list[int]], thought_tokens: int) -> list[list[int]]:
        """Runs the prompts together; returns them with their thoughts."""
        self.step_s.clear()
        rids = []
        for prompt in prompts:
            rids.append(f"r{len(self.tokens)}")
            self.tokens[rids[-1]] = []
            sampling = SamplingParams(max_new_tokens=thought_tokens, ignore_eos=True)
            self.scheduler.add(GenerateRequest(rids[-1], prompt, sampling))
        while self.scheduler.busy:
            done = [len(self.tokens[rid]) for rid in rids]
            start = time.perf_counter()
            self.scheduler.step()
            seconds = time.perf_counter() - start
            grown = sum(len(self.tokens[rid]) for rid in rids) - sum(done)
            if min(done) > 0 and grown == len(rids):
                self.step_s.append(seconds)
                kinds = {kind.name: kind for kind in self.cache.profile.kinds}
                self.kv_bytes = sum(
                    stats.pages_used * kinds[name].bytes_per_page(self.cache.arena.geometry)
                    for name, stats in self.cache.pool.stats().kinds.items()
                )
        return [prompt + self.tokens[rid] for prompt, rid in zip(prompts, rids, strict=True)]


def run(runner: ModelRunner, shape: Shape, mode: str) -> Row:
    """One whole search."""
    search = Search(runner, shape, cached=mode != "no cache")
    rng = random.Random(5)
    vocab = runner.config.vocab_size

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, vocab) for _ in range(count)]

    reads = PageCounter()
    paths = [ids(shape.prompt_tokens)]
    start = time.perf_counter()
    with planning(reads, own_reads=mode == "own reads"):
        for _ in range(LEVELS):
            reads.pages = 0
            level_start = time.perf_counter()
            prompts = [path + ids(SUFFIX_TOKENS) for path in paths for _ in range(shape.branching)]
            paths = search.level(prompts, shape.thought_tokens)
    end = time.perf_counter()
    assert len(paths) == shape.leaves
    statistics = search.scheduler.statistics
    return Row(
        mode,
        shape.leaves,
        end - start,
        end - level_start,
        float(np.median(search.step_s)) * 1e3,
        statistics.prompt_tokens,
        statistics.computed_tokens,
        reads.pages,
        search.kv_bytes,
    )


class PageCounter:
    """Counts the pages that plans read."""

    pages = 0


@contextmanager
def planning(counter: PageCounter, own_reads: bool) -> Iterator[None]:
    """Counts what the batches read; with `own_reads`, shares nothing between requests."""
    build: Callable[..., SegmentTable] = batch.build_segments

    def counted(*args: Any) -> SegmentTable:
        table = build(*args)
        if own_reads:
            table = unshared(table)
        counter.pages += len(table.addresses)
        return table

    batch.build_segments = counted
    try:
        yield
    finally:
        batch.build_segments = build


def unshared(table: SegmentTable) -> SegmentTable:
    """A table in which every segment has one reader."""
    segment = np.repeat(np.arange(len(table.kind_index)), table.num_readers)
    num_pages = table.num_pages[segment]
    return SegmentTable(
        table.addresses[ranges(table.page_start[segment], num_pages)],
        offsets(num_pages),
        table.kind_index[segment],
        table.last_page_len[segment],
        table.readers,
        np.arange(len(table.readers) + 1),
    )


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    by_mode = {row.mode: row for row in rows}
    shared, own, none = (by_mode[mode] for mode in ("shared", "own reads", "no cache"))
    return [
        Claim.at_most(
            "computed tokens, of no cache", shared.computed_tokens / none.computed_tokens, 0.1, "x"
        ),
        Claim.at_most("total time, of no cache", shared.total_s / none.total_s, 0.5, "x"),
        Claim.at_most("pages read, of own reads", shared.pages_read / own.pages_read, 0.3, "x"),
        Claim.at_most("leaf step, of own reads", shared.leaf_step_ms / own.leaf_step_ms, 0.8, "x"),
    ]


def plot(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4))
    panels: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("whole search, s", lambda row: row.total_s),
        ("decode step of the leaves, ms", lambda row: row.leaf_step_ms),
        ("prompt tokens computed", lambda row: row.computed_tokens),
    )
    for place, (label, value) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 3, place)
        bars = axes.bar([row.mode for row in rows], [value(row) for row in rows])
        axes.bar_label(bars, fmt="%.4g")
        axes.set_ylabel(label)
    figure.suptitle(f"Tree search, {rows[0].leaves} leaves")
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--branching", type=int, default=4, help="thoughts of each node")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--thought-tokens", type=int, default=56)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-write", action="store_true", help="only print")
    args = parser.parse_args()
    record = Record("tree_search")
    shape = Shape(args.branching, args.prompt_tokens, args.thought_tokens)
    settings = ServerArgs(random_seed=1, cpu_threads=args.threads)
    runner = ModelRunner(settings, str(resolve_model_path(None)))
    run(runner, Shape(args.branching, 64, 8), "shared")  # first calls at a batch size are slow
    rows = [run(runner, shape, mode) for mode in ("shared", "own reads", "no cache")]
    facts: list[dict[str, Any]] = [row._asdict() for row in rows]
    columns = dict.fromkeys(Row._fields, ",")
    columns |= {"mode": "", "total_s": ".1f", "leaf_level_s": ".1f", "leaf_step_ms": ".1f"}
    print(format_table(facts, columns))
    claims = claims_of(rows)
    print(format_claims(claims))
    if not args.no_write:
        record.write(facts, claims, plot(rows))


if __name__ == "__main__":
    main()
