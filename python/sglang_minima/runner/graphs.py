"""CUDA graphs of decode steps: captured by batch size, replayed where nothing differs but data.

A graph holds addresses, grids and which kernels run; the pages, readers and lengths of a step are
data in fixed buffers. A step is replayed only if a graph was captured for its number of rows and
the page kinds that it reads (the homogeneous-cohort check of Minima-KV); any other runs eagerly
and is counted with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels import Segment, plan_decode
from minima_kernels.cuda.space import DecodeLimits, DecodeSpace
from minima_kernels.cuda.work import cohort_rule
from minima_kernels.routes import ROUTES, Route
from sglang_minima.cache.arena import KVArena
from sglang_minima.runner.batch import DecodeMemory, ForwardBatch
from sglang_minima.runner.inputs import FixedInputs
from sglang_minima.runner.segments import KvReads

_LARGEST_BUCKET = 256


class StepTensors(NamedTuple):
    """What the model makes of a batch."""

    hidden: torch.Tensor
    """[rows, hidden]"""
    logits: torch.Tensor
    """float32 [rows, vocab]"""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tensors: StepTensors
    routes: tuple[tuple[Route, int], ...]
    """What a run through it counts."""


def bucket_sizes(most_rows: int) -> tuple[int, ...]:
    """Powers of two up to `most_rows`, and that itself; at most 256 rows are captured."""
    most = min(most_rows, _LARGEST_BUCKET)
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*powers, most)


class DecodeGraphs:
    """The graphs of one model over one arena, and the fixed memory of decode steps."""

    def __init__(
        self,
        run: Callable[[ForwardBatch], StepTensors],
        arena: KVArena,
        most_rows: int,
        num_heads: int,
        context_length: int,
    ) -> None:
        """run: the whole decode step, from token ids to logits."""
        geometry, kinds = arena.geometry, arena.profile.kinds
        device = arena.buffer.device
        buckets = bucket_sizes(most_rows)
        pages = buckets[-1] * -(-context_length // geometry.page_size)
        smallest = min(kind.granules(geometry) for kind in kinds)
        pages = min(pages, arena.granules // smallest)
        limits = DecodeLimits.of(buckets[-1], pages, num_heads, len(kinds), geometry)
        self.memory = DecodeMemory(
            DecodeSpace(device, limits), FixedInputs(buckets[-1], device), buckets
        )
        self._run = run
        self._arena = arena
        self._num_heads = num_heads
        self._graphs: dict[Hashable, _Captured] = {}

    @property
    def scratch_bytes(self) -> int:
        """Device memory of work lists, query fragments, partials and inputs; graphs not counted."""
        return self.memory.space.num_bytes + self.memory.inputs.num_bytes

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures steps of every bucket: of Recent pages alone, and with Stale pages that rows
        read alone, together, or both; each without and with Recent pages that rows read together
        in a cohort, where there are such."""
        pool = torch.cuda.graph_pool_handle()
        stale = len(self._arena.profile.kinds) - 1
        # The largest first: its memory serves the others.
        for num_rows in reversed(self.memory.buckets):
            for alone, *together in product((True, False), repeat=3):
                shared = [k for k, chosen in zip((stale, 0), together, strict=True) if chosen]
                batch = self._empty_batch(num_rows, alone * stale, shared)
                signature = self._signature(batch)
                if signature is None or signature in self._graphs:
                    continue
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._run(batch)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                before = Counter(ROUTES.snapshot())
                with torch.cuda.graph(graph, pool=pool):
                    tensors = self._run(batch)
                routes = Counter(ROUTES.snapshot()) - before
                self._graphs[signature] = _Captured(graph, tensors, tuple(routes.items()))
        torch.cuda.synchronize()

    def replay(self, batch: ForwardBatch) -> StepTensors | None:
        """Runs a decode step by its graph; None, and nothing has run, where there is none.

        The tensors are overwritten by the next replay.
        """
        if batch.decode_plan is None:
            return None
        if not batch.fixed:
            reason = "prefill in the batch" if batch.extend_rows else "more rows than captured"
            ROUTES.count("graph", "eager", reason)
            return None
        captured = self._graphs.get(self._signature(batch))
        if captured is None:
            ROUTES.count("graph", "eager", "pages or plan unlike the captured ones")
            return None
        captured.graph.replay()
        ROUTES.count("graph", "replay")
        for route, times in captured.routes:
            ROUTES.count(*route, times=times)
        return captured.tensors

    def _signature(self, batch: ForwardBatch) -> Hashable:
        assert batch.decode_plan is not None
        return batch.decode_plan.cuda(self._num_heads).signature

    def _empty_batch(self, num_rows: int, alone: int, shared: Sequence[int]) -> ForwardBatch:
        """Rows that read the first page of the arena, and write nowhere: each as a Recent page and
        as one of kind `alone`, and all together as pages of the kinds `shared`."""
        geometry, device = self._arena.geometry, self._arena.buffer.device
        all_kinds = self._arena.profile.kinds
        values = np.zeros((4, num_rows), dtype=np.int64)
        values[2] = -1
        size, rows = geometry.page_size, range(num_rows)
        kinds = (0, alone) if alone else (0,)
        segments = [Segment([0], kind, size, [row]) for row in rows for kind in kinds]
        group_size = self._num_heads // geometry.num_kv_heads
        for kind in shared:
            rule = cohort_rule(all_kinds[kind])
            pages = rule and rule.least_pages(num_rows, group_size, geometry.num_kv_heads)
            if pages:
                segments.append(Segment([0] * pages, kind, size, rows))
        plan = plan_decode(
            segments,
            num_rows,
            all_kinds,
            geometry,
            device,
            space=self.memory.space,
        )
        inputs = self.memory.inputs.load(values)
        return ForwardBatch(
            input_ids=inputs[0],
            positions=inputs[1],
            page_bytes=inputs[2],
            slots=inputs[3],
            extend_rows=0,
            extend_plan=None,
            decode_plan=plan,
            reads=KvReads(0, 0),
            num_rows=num_rows,
            fixed=True,
        )
