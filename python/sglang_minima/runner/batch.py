"""One forward pass as data: which tokens run, where their KV goes, what they attend to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minima_kernels import GRANULE
from minima_kernels.attention import (
    DecodePlan,
    ExtendPlan,
    Segment,
    plan_decode,
    plan_extend,
)
from minima_radix import RequestTable
from sglang_minima.cache.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Work:
    """Tokens [start, stop) of one sequence to run through the model."""

    table: RequestTable
    token_ids: np.ndarray
    """int32 [stop - start]"""
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

    def row_range(self, index: int) -> tuple[int, int]:
        """Rows of works[index]."""
        first = sum(len(work.token_ids) for work in self.works[:index])
        return first, first + len(self.works[index].token_ids)


def build_batch(works: Sequence[Work], cache: PrefixCache, device: torch.device) -> ForwardBatch:
    """Lays the works out and plans their attention.

    The pages that take the new tokens must be reserved already. A one-token work reads its own
    token from its page; a longer one reads its tokens directly and the pages before them.
    """
    extends = [work for work in works if len(work.token_ids) > 1]
    decodes = [work for work in works if len(work.token_ids) == 1]
    ordered = (*extends, *decodes)
    page_size = cache.arena.geometry.page_size
    positions = np.concatenate([np.arange(work.start, work.stop) for work in ordered])
    pages = np.concatenate(
        [
            _addresses(work.table.pages)[np.arange(work.start, work.stop) // page_size]
            for work in ordered
        ]
    )
    lengths = [len(work.token_ids) for work in extends]
    extend_plan = decode_plan = None
    if extends:
        indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        extend_plan = plan_extend(
            build_segments([(work.table, work.start) for work in extends], cache),
            indptr,
            cache.profile.kinds,
            cache.arena.geometry,
            device,
        )
    if decodes:
        decode_plan = plan_decode(
            build_segments([(work.table, work.stop) for work in decodes], cache),
            len(decodes),
            cache.profile.kinds,
            cache.arena.geometry,
            device,
        )
    return ForwardBatch(
        works=ordered,
        input_ids=_tensor(np.concatenate([work.token_ids for work in ordered]), device),
        positions=_tensor(positions, device),
        page_bytes=_tensor(pages * GRANULE, device),
        slots=_tensor(positions % page_size, device),
        extend_rows=sum(lengths),
        extend_plan=extend_plan,
        decode_plan=decode_plan,
    )


def build_segments(
    readers: Sequence[tuple[RequestTable, int]], cache: PrefixCache
) -> list[Segment]:
    """Cuts what the readers attend to into runs of pages with the same readers and kind.

    Every tree node on the path of several readers becomes one segment that all of them share, so
    its pages are read once; nested nodes give a cascade.

    Args:
        readers: (block table, number of leading tokens to read), reader i is row group i.
        cache: tells the kind of a page.
    """
    nodes: dict[int, tuple[np.ndarray, list[int]]] = {}
    segments: list[Segment] = []
    page_size = cache.arena.geometry.page_size
    for index, (table, length) in enumerate(readers):
        node = table.node
        while node is not None and node.parent is not None:
            if id(node) not in nodes:
                nodes[id(node)] = _addresses(node.pages), []
            nodes[id(node)][1].append(index)
            node = node.parent
        pages = _addresses(table.pages)
        full, tail = divmod(length, page_size)
        segments += _cut(pages[table.bound_pages : full], [index], cache)
        if tail:
            kind = int(cache.kind_indices(pages[full : full + 1])[0])
            segments.append(Segment(pages[full : full + 1], kind, tail, [index]))
    for pages, sharing in nodes.values():
        segments += _cut(pages, sharing, cache)
    return segments


def _cut(pages: np.ndarray, readers: list[int], cache: PrefixCache) -> list[Segment]:
    """Splits full pages by kind. Their order does not matter: RoPE is already in the keys."""
    if not len(pages):
        return []
    kinds = cache.kind_indices(pages)
    page_size = cache.arena.geometry.page_size
    return [
        Segment(pages[kinds == kind], int(kind), page_size, readers) for kind in np.unique(kinds)
    ]


def _addresses(pages: array[int]) -> np.ndarray:
    """int64 [n], a copy: a view would forbid the array to grow."""
    return np.frombuffer(pages, dtype=np.int64).copy()


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
