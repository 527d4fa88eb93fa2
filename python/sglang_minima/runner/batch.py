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
from minima_kernels.cuda.space import DecodeSpace
from minima_kernels.upload import upload
from minima_radix import RequestTable
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.inputs import FixedInputs
from sglang_minima.runner.segments import Cohorts, KvReads, build_segments, count_reads


class Work(NamedTuple):
    """Tokens [start, stop) of one sequence to run through the model."""

    table: RequestTable
    token_ids: Sequence[int]
    """stop - start ids; an `array('i')` or an int32 array is fastest."""
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


class DecodeRows(NamedTuple):
    """One token each of several sequences, as three lists: a step has no time for an object of
    each."""

    tables: list[RequestTable]
    token_ids: list[int] | torch.Tensor
    """A tensor, int64 on the device, where they are still being sampled."""
    starts: list[int]
    """Position of the token in its sequence."""


class DecodeMemory(NamedTuple):
    """Device memory at fixed addresses for decode steps, so that CUDA graphs can replay them."""

    space: DecodeSpace
    inputs: FixedInputs
    buckets: tuple[int, ...]
    """Row counts to which steps are padded, ascending."""

    def bucket(self, num_rows: int) -> int | None:
        """Rows of the step that a batch of `num_rows` is padded to; None: too many."""
        return next((size for size in self.buckets if size >= num_rows), None)


@dataclass(frozen=True)
class ForwardBatch:
    """Rows are the tokens of all works one after another: first works of several tokens
    (extend), then sequences with one token (decode), then padding."""

    input_ids: torch.Tensor
    """int64 [rows]"""
    positions: torch.Tensor
    """int64 [rows]"""
    page_bytes: torch.Tensor
    """int64 [rows]: byte address of the page that takes the row's KV; -1: none, it is padding."""
    slots: torch.Tensor
    """int64 [rows]: token slot in that page."""
    extend_rows: int
    extend_plan: ExtendPlan | None
    decode_plan: DecodePlan | None
    reads: KvReads
    num_rows: int
    """Rows without padding."""
    fixed: bool = False
    """All tensors are in the memory of `DecodeMemory`."""


def build_batch(
    extends: Sequence[Work],
    decodes: DecodeRows,
    cache: PrefixCache,
    device: torch.device,
    cohorts: Cohorts | None = None,
    memory: DecodeMemory | None = None,
) -> ForwardBatch:
    """Lays the works out as rows and plans their attention. The cache must not change before the
    batch has run.

    Args:
        cohorts: what the decodes of the step before shared.
        memory: where the work lists of decodes go, and whole batches of nothing else.
    """
    profile, geometry = cache.profile, cache.arena.geometry
    page_size = geometry.page_size
    rows = [_extend_rows(work, page_size) for work in extends]
    extend_plan = decode_plan = None
    reads: list[KvReads] = []
    num_rows = sum(len(work.token_ids) for work in extends)
    extend_rows = num_rows
    bucket = None
    if memory is not None and not extends:
        bucket = memory.bucket(len(decodes.tables))
    if extends:
        segments = build_segments(
            [work.table for work in extends], [work.start for work in extends], cache
        )
        reads.append(count_reads(segments, cache))
        extend_plan = plan_extend(
            segments,
            offsets([len(work.token_ids) for work in extends]),
            profile.kinds,
            geometry,
            device,
        )
    if decodes.tables:
        starts = np.array(decodes.starts, dtype=np.int64)
        pages = [
            table.pages[start // page_size]
            for table, start in zip(decodes.tables, decodes.starts, strict=True)
        ]
        ids = _known(decodes)
        rows.append(_Rows(ids, starts, np.array(pages, dtype=np.int64)))
        ends = [start + 1 for start in decodes.starts]
        segments = build_segments(decodes.tables, ends, cache, cohorts)
        reads.append(count_reads(segments, cache))
        num_rows += len(starts)
        decode_plan = plan_decode(
            segments,
            bucket or len(starts),
            profile.kinds,
            geometry,
            device,
            space=None if memory is None else memory.space,
        )
    parts = rows[0] if len(rows) == 1 else _Rows(*map(np.concatenate, zip(*rows, strict=True)))
    values = np.zeros((4, bucket or num_rows), dtype=np.int64)
    values[2] = -1
    for row, part in zip(
        values,
        (parts.ids, parts.positions, parts.pages * GRANULE, parts.positions % page_size),
        strict=True,
    ):
        row[:num_rows] = part
    if bucket is not None and memory is not None:
        inputs = memory.inputs.load(values)
    else:
        inputs = upload(values, torch.int64, device)
    if isinstance(decodes.token_ids, torch.Tensor):
        # A row for which nothing could be sampled runs for nothing, but it must run.
        torch.clamp(decodes.token_ids, min=0, out=inputs[0, extend_rows:num_rows])
    return ForwardBatch(
        input_ids=inputs[0],
        positions=inputs[1],
        page_bytes=inputs[2],
        slots=inputs[3],
        extend_rows=extend_rows,
        extend_plan=extend_plan,
        decode_plan=decode_plan,
        reads=KvReads(sum(read.shared for read in reads), sum(read.per_request for read in reads)),
        num_rows=num_rows,
        fixed=bucket is not None,
    )


class _Rows(NamedTuple):
    """Rows of a batch, int64 [n] each."""

    ids: np.ndarray
    positions: np.ndarray
    pages: np.ndarray


def _known(decodes: DecodeRows) -> np.ndarray:
    """The token ids, int64 [rows]; 0 for those that are still to come."""
    if isinstance(decodes.token_ids, torch.Tensor):
        return np.zeros(len(decodes.tables), dtype=np.int64)
    return np.array(decodes.token_ids, dtype=np.int64)


def _extend_rows(work: Work, page_size: int) -> _Rows:
    positions = np.arange(work.start, work.stop)
    first = work.start // page_size
    pages = np.array(work.table.pages[first : -(-work.stop // page_size)])
    return _Rows(
        np.array(work.token_ids, dtype=np.int64), positions, pages[positions // page_size - first]
    )
