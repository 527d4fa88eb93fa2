"""What scheduling costs on the CPU: a step, a prefix match, an eviction, as the cache grows.

    python benchmark/scheduler_cost.py

No model: a stub runner returns random hidden states and logits (1,024 tokens of vocabulary). The
time of a step is `Scheduler.step` without the stub's time and without the kernel that re-encodes
pages; everything else counts: batch forming, segments and attention plan, sampling, stop
conditions, sealing, tiers, output messages and their encoding. One thread; allocator and garbage
collector are set as the scheduler process sets them.

- step: 64 requests decode, each over a 1,536-token prompt prefix that all share and some 500
  tokens of its own, while the cache holds N further pages.
- step, all read: the N cached pages are the contexts of the 64 requests (all share the first
  half, 1/65 of the pages), up to 200,000 of them. This one may grow: attention reads them all.
- match: a cached prefix of 100,000 tokens among N pages.
- evict: one page out of tree and pool where every leaf has one page: N leaves, 250 under each
  inner node.
- evict, one parent: the same with all leaves under one node.

Times are CPU times of the thread, so that other load on the machine shows only as far as it slows
the core down.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from common import Claim, Record, format_claims, format_table

from minima_kernels import GRANULE, KVGeometry
from minima_kernels.allocator import keep_freed_memory
from minima_kernels.transfer import retier
from minima_radix import Namespace, Node, ReferenceKind
from minima_radix.room import CACHE_HOLDER
from sglang_minima.cache import controller
from sglang_minima.cache.arena import KVArena
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.cache.profile import build_profile
from sglang_minima.messages import GenerateRequest, TokenBatch, TokenOutput
from sglang_minima.runner.batch import ForwardBatch
from sglang_minima.runner.model_runner import ForwardOutput, ModelRunner
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler.garbage import avoid_full_collections, forget_old_objects
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.server_args import ServerArgs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNNING = 64
PAGE = 64
SHARED_TOKENS = 1536
VOCAB = 1024
MATCH_TOKENS = 100_000
CLAIM_PAGES = 50_000
MOST_READ = 200_000
"""Pages of the largest contexts together."""
SIBLINGS = 250
SIZES = (1_000, 10_000, 50_000, 200_000, 1_000_000)
GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=64, page_size=PAGE)
NAMESPACE = Namespace(None, None, "minima")
KIND = "fp8"


class Stopwatch:
    """Sums the time of the calls that do not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - start

        return timed


class StubRunner:
    """Looks like a model runner and computes nothing."""

    device = torch.device("cpu")
    context_length = 1 << 20
    decode_memory = None

    def load(self, batch: ForwardBatch) -> None:
        """Nothing: the work list is made with the first layer."""

    def __init__(self, watch: Stopwatch) -> None:
        self._logits = torch.randn(RUNNING, VOCAB)
        self._model = watch.wrap(lambda batch: torch.zeros(len(batch.input_ids), 1))
        self.logits = watch.wrap(self._head)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if batch.decode_plan is not None:
            # What the first layer does: its work list is host work too.
            assert batch.decode_plan.native.num_rows > 0
        return ForwardOutput(self._model(batch), None, self.logits)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class Bench:
    """A cache of a given size with a scheduler over it."""

    def __init__(self, pages: int) -> None:
        self.args = ServerArgs(
            page_size=PAGE,
            max_running_requests=RUNNING,
            chunked_prefill_size=8192,
            random_seed=1,
        )
        profile = build_profile(self.args, GEOMETRY, torch.float32)
        room = pages + RUNNING * 64 + 2048
        # Pages that nobody computes are never touched: the memory stays virtual.
        size = room * profile.recent.bytes_per_page(GEOMETRY) // GRANULE * GRANULE
        arena = KVArena(torch.empty(size, dtype=torch.uint8), GEOMETRY, profile)
        self.cache = PrefixCache(self.args, arena)
        self.watch = Stopwatch()
        controller.retier = self.watch.wrap(retier)
        self.sent = 0
        runner = cast(ModelRunner, StubRunner(self.watch))
        self.scheduler = Scheduler(self.args, runner, self.cache, None, frozenset(), self._count)
        assert self.cache.tree is not None
        self.tree = self.cache.tree
        self._random = np.random.default_rng(0)
        self._encoder = msgspec.msgpack.Encoder()

    def _count(self, outputs: list[TokenOutput]) -> None:
        self.sent += len(outputs)
        self._encoder.encode(TokenBatch(outputs))

    def tokens(self, count: int) -> array[int]:
        """Random ids."""
        return array("i", self._random.integers(0, VOCAB, count, dtype=np.int32).tobytes())

    def fill(self, pages: int, leaf_pages: int) -> None:
        """Puts pages into the tree, as if finished requests of `leaf_pages` pages each had."""
        for _ in range(pages // leaf_pages):
            self.insert(self.tokens(leaf_pages * PAGE))

    def insert(self, tokens: array[int], parent: Node | None = None) -> Node:
        """Whole pages that only the cache holds, below a node."""
        pages = [
            self.cache.pool.allocate(KIND, ReferenceKind.CACHE, CACHE_HOLDER)
            for _ in range(len(tokens) // PAGE)
        ]
        result = self.tree.insert(NAMESPACE, parent, tokens, pages)
        for page in pages[: len(result.twins)]:
            self.cache.pool.release(page, ReferenceKind.CACHE, CACHE_HOLDER)
        return result.node

    def step_times(self, private_tokens: int, shared_tokens: int, steps: int) -> np.ndarray:
        """Milliseconds of `steps` decode steps of RUNNING requests, without stub and kernels."""
        rng = random.Random(1)
        shared = self.tokens(shared_tokens).tolist()
        for index in range(RUNNING):
            private = self.tokens(private_tokens + rng.randrange(-64, 64)).tolist()
            sampling = SamplingParams(temperature=0.0, max_new_tokens=1 << 20, ignore_eos=True)
            self.scheduler.add(GenerateRequest(f"r{index}", shared + private, sampling))
        while self.scheduler.waiting:
            self.scheduler.step()
        while self.cache.controller.backlog:
            self.scheduler.step()
        settle_memory()
        times = []
        for _ in range(steps):
            self.watch.seconds, sent = 0.0, self.sent
            start = time.thread_time()
            self.scheduler.step()
            times.append(time.thread_time() - start - self.watch.seconds)
            assert self.sent - sent == RUNNING
        return np.array(times) * 1e3


class Result(NamedTuple):
    """Quantiles of one measurement."""

    what: str
    pages: int
    unit: str
    median: float
    p95: float
    worst: float
    repeats: int


def _result(what: str, pages: int, unit: str, values: np.ndarray) -> Result:
    median, p95 = np.percentile(values, [50, 95]).tolist()
    return Result(what, pages, unit, median, p95, float(values.max()), len(values))


def measure_step(bench: Bench, pages: int, steps: int) -> Result:
    """Decode steps while the cache holds `pages` others."""
    times = bench.step_times(512, SHARED_TOKENS, steps)
    return _result("step", pages, "ms", times)


def measure_reading_step(pages: int, steps: int) -> Result:
    """Decode steps that read all cached pages."""
    bench = Bench(pages)
    context = pages // (RUNNING + 1) * PAGE
    return _result("step, all read", pages, "ms", bench.step_times(context, context, steps))


def measure_match(bench: Bench, pages: int, repeats: int) -> Result:
    """Matches of a long prefix while the cache holds `pages` others."""
    tokens = bench.tokens(MATCH_TOKENS)
    # As a conversation grows: ten nodes, since a sibling branches off at the end of each.
    for turn in range(1, 11):
        end = MATCH_TOKENS * turn // 10 // PAGE * PAGE
        bench.insert(tokens[:end])
        bench.insert(tokens[: end // 2 // PAGE * PAGE] + bench.tokens(PAGE))
    settle_memory()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        match = bench.tree.match(NAMESPACE, tokens)
        times.append((time.thread_time() - start) * 1e3)
        assert len(match.pages) == MATCH_TOKENS // PAGE
    return _result("match", pages, "ms", np.array(times))


def measure_evict(what: str, pages: int, repeats: int, siblings: int) -> Result:
    """Evictions where `pages` leaves have a page each, `siblings` of them under one parent."""
    bench = Bench(2 * pages)
    for _ in range(-(-pages // siblings)):
        parent = bench.insert(bench.tokens(PAGE))
        # A leaf with no more than one user grows; the children are to be nodes of their own.
        for _ in range(2):
            bench.tree.lock(parent, 1)
        tokens = bench.tokens(siblings * PAGE)
        for first in range(0, len(tokens), PAGE):
            bench.insert(tokens[first : first + PAGE], parent)
        for _ in range(2):
            bench.tree.unlock(parent)
        assert len(parent.children) == siblings
    settle_memory()
    times = []
    for _ in range(min(repeats, pages // 2)):
        start = time.thread_time()
        evicted = bench.tree.evict_page()
        assert evicted is not None
        bench.cache.pool.release(evicted.page, ReferenceKind.CACHE, CACHE_HOLDER)
        times.append((time.thread_time() - start) * 1e6)
    return _result(what, pages, "us", np.array(times))


def settle_memory() -> None:
    """What the scheduler process does in its first quiet moment."""
    forget_old_objects()


def measure(pages: int, steps: int) -> list[Result]:
    """Everything at one size."""
    bench = Bench(pages + MATCH_TOKENS // PAGE)
    bench.fill(pages, 10)
    results = [measure_match(bench, pages, steps), measure_step(bench, pages, steps)]
    del bench
    if pages <= MOST_READ:
        results.append(measure_reading_step(pages, steps))
    results.append(measure_evict("evict", pages, steps * 8, SIBLINGS))
    results.append(measure_evict("evict, one parent", pages, steps * 8, pages))
    return results


def claims_of(results: Sequence[Result]) -> list[Claim]:
    targets = {
        "step": ("CPU time of a step, 64 running", 1.0),
        "match": ("match of a 100K-token cached prefix", 2.0),
        "evict": ("eviction of one page", 20.0),
        "evict, one parent": ("eviction of one page, all leaves under one node", 20.0),
    }
    return [
        Claim.at_most(
            f"{targets[r.what][0]}, {r.pages} pages", r.median, targets[r.what][1], r.unit
        )
        for r in results
        if r.what in targets and r.pages == CLAIM_PAGES
    ]


def plot(results: Sequence[Result]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6))
    panels = (
        (("step", "step, all read"), "pages", "ms", 1.0),
        (("match",), "pages", "ms", 2.0),
        (("evict", "evict, one parent"), "leaves", "us", 20.0),
    )
    for place, (names, what, unit, target) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 3, place)
        for name in names:
            rows = [r for r in results if r.what == name]
            axes.plot([r.pages for r in rows], [r.median for r in rows], "o-", label=name)
            axes.fill_between(
                [r.pages for r in rows], [r.median for r in rows], [r.p95 for r in rows], alpha=0.2
            )
        axes.axhline(target, color="grey", linestyle=":", label="target at 50,000")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(what)
        axes.set_ylabel(f"{unit} (median, p95)")
        axes.legend()
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="pages")
    parser.add_argument("--steps", type=int, default=192, help="decode steps of a measurement")
    parser.add_argument("--no-write", action="store_true", help="only print")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = Record("scheduler_cost")
    results: list[Result] = []
    keep_freed_memory()
    avoid_full_collections()
    for pages in args.sizes:
        results += measure(pages, args.steps)
        print(f"measured {pages:,} pages", flush=True)
    rows = [result._asdict() for result in results]
    print(
        format_table(
            rows,
            {"what": "", "pages": ",", "median": ".3f", "p95": ".3f", "worst": ".2f", "unit": ""},
        )
    )
    claims = claims_of(results)
    print(format_claims(claims))
    if not args.no_write:
        record.write(rows, claims, plot(results))


if __name__ == "__main__":
    main()
