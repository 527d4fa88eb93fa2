"""One forward pass as data: which tokens run, where their KV goes, what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels import GRANULE
from minima_kernels.attention import (
    DecodePlan,
    ExtendPlan,
    plan_decode,
    plan_extend,
)
from minima_kernels.attention.segments import offsets
from minima_radix import RequestTable
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.segments import KvReads, build_segments, count_reads


class Work(NamedTuple):
    """Tokens [start, stop) of one sequence to run through the model."""

    table: RequestTable
    token_ids: Sequence[int]
    """stop - start ids; an `array('i')` or an int32 array is fastest."""
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ForwardBatch:
    """Rows are the tokens of all works one after another: first works of several tokens
    (extend), then works of one token (decode)."""

    works: tuple[Work, ...]
    input_ids: torch.Tensor
    """int64 [rows]"""
    positions: torch.Tensor
    """int64 [rows]"""
    page_bytes: torch.Tensor
    """int64 [rows]: byte address of the page that takes the row's KV."""
    slots: torch.Tensor
    """int64 [rows]: token slot in that page."""
    extend_rows: int
    extend_plan: ExtendPlan | None
    decode_plan: DecodePlan | None
    reads: KvReads


def build_batch(works: Sequence[Work], cache: PrefixCache, device: torch.device) -> ForwardBatch:
    """Lays the works out as rows and plans their attention. The cache must not change before the
    batch has run."""
    extends = [work for work in works if len(work.token_ids) > 1]
    decodes = [work for work in works if len(work.token_ids) == 1]
    profile, geometry = cache.profile, cache.arena.geometry
    page_size = geometry.page_size
    lengths = [len(work.token_ids) for work in extends]
    rows = [_extend_rows(work, page_size) for work in extends]
    if decodes:
        ids = np.array([work.token_ids[0] for work in decodes], dtype=np.int64)
        positions = np.array([work.start for work in decodes], dtype=np.int64)
        open_pages = [work.table.pages[work.start // page_size] for work in decodes]
        rows.append(_Rows(ids, positions, np.array(open_pages, dtype=np.int64)))
    extend_plan = decode_plan = None
    reads: list[KvReads] = []
    if extends:
        segments = build_segments([(work.table, work.start) for work in extends], cache)
        reads.append(count_reads(segments, cache))
        extend_plan = plan_extend(
            segments,
            offsets(lengths),
            profile.kinds,
            geometry,
            device,
        )
    if decodes:
        segments = build_segments([(work.table, work.start + 1) for work in decodes], cache)
        reads.append(count_reads(segments, cache))
        decode_plan = plan_decode(
            segments,
            len(decodes),
            profile.kinds,
            geometry,
            device,
        )
    ids, positions, pages = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return ForwardBatch(
        works=(*extends, *decodes),
        input_ids=_tensor(ids, device),
        positions=_tensor(positions, device),
        page_bytes=_tensor(pages * GRANULE, device),
        slots=_tensor(positions % page_size, device),
        extend_rows=sum(lengths),
        extend_plan=extend_plan,
        decode_plan=decode_plan,
        reads=KvReads(sum(read.shared for read in reads), sum(read.per_request for read in reads)),
    )


class _Rows(NamedTuple):
    """Rows of a batch, int64 [n] each."""

    ids: np.ndarray
    positions: np.ndarray
    pages: np.ndarray


def _extend_rows(work: Work, page_size: int) -> _Rows:
    positions = np.arange(work.start, work.stop)
    first = work.start // page_size
    pages = np.array(work.table.pages[first : -(-work.stop // page_size)])
    return _Rows(
        np.array(work.token_ids, dtype=np.int64), positions, pages[positions // page_size - first]
    )


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
