"""Decode attention on a GPU: a plan as launches with fixed addresses, and their run."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.merge import State
from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.segments import SegmentTable
from minima_kernels.cuda.driver import Launch
from minima_kernels.cuda.launches import (
    Launches,
    Rows,
    kernel_name,
    num_processors,
    set_output,
    set_pages,
    set_queries,
)
from minima_kernels.cuda.plan import COLUMNS, entry_rows, mass_columns, prepare_columns
from minima_kernels.cuda.scratch import Scratch
from minima_kernels.cuda.space import DecodeSpace, SpaceExceeded
from minima_kernels.cuda.variants import DTYPES, WARPS, decode_variant, has_cohorts
from minima_kernels.cuda.work import Cut, Grid, Work
from minima_kernels.formats import BF16, F16, TQ, Format
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.rotation import Rotation
from minima_kernels.upload import upload


class _Attention(NamedTuple):
    """An attention kernel of a layer; it reads the arena from ``offset`` on."""

    launch: Launch
    offset: int


class CudaDecode:
    """A decode plan for one number of query heads.

    All device memory that runs need, apart from their outputs, is that of ``space`` and stays in
    place, so a run launches kernels only and can be captured in a CUDA graph. A space with limits
    holds one plan at a time: making the next one ends this one.

    Attributes:
        scratch: what the kernels hand to each other.
        signature: captured runs of plans in one space may be replayed for each other where it is
            equal; ``None`` where the space is this plan's own.

    Raises:
        SpaceExceeded: the plan does not fit the space.
    """

    def __init__(
        self,
        table: SegmentTable,
        num_rows: int,
        num_heads: int,
        kinds: tuple[PageKind, ...],
        geometry: KVGeometry,
        device: torch.device,
        query_bits: int,
        space: DecodeSpace | None = None,
    ) -> None:
        self._space = space = DecodeSpace(device) if space is None else space
        limits = space.limits
        self._num_rows, self._num_heads = num_rows, num_heads
        self._kinds, self._geometry, self._device = kinds, geometry, device
        self._query_bits = query_bits
        self._group_size = num_heads // geometry.num_kv_heads
        self._num_entries = int(table.first_entries()[-1])
        self._table = table
        # In memory for many plans the partials of stacked rows begin at one place for all.
        most_slots = None if limits is None else limits.items
        work = Work(table, num_rows, self._group_size, kinds, geometry, most_slots)
        used = work.used_kinds().tolist()
        cuts: dict[tuple[Format, ...], Cut] = {}
        self._layer_cuts: list[Cut] = []
        for layer in range(geometry.num_layers):
            layer_formats = tuple(kinds[k].formats[layer] for k in used)
            cut = cuts.get(layer_formats)
            if cut is None:
                pairs = zip(used, layer_formats, strict=True)
                cut = work.cut({k: self._grid(work, k, format_) for k, format_ in pairs})
                cuts[layer_formats] = cut
            self._layer_cuts.append(cut)
        num_tiles = len(work.tiles.block)
        most_tiles = num_tiles if limits is None else limits.tiles_of(num_rows)
        if num_tiles > most_tiles:
            raise SpaceExceeded(f"{num_tiles} tiles, room for {most_tiles}")
        # Tiles that are not there have no columns.
        columns = prepare_columns(work.tiles, num_heads, self._group_size)
        missing = np.full((most_tiles - num_tiles, COLUMNS), -1, dtype=np.int32)
        arrays = {
            **work.arrays,
            "pages": table.addresses,
            "prepare_columns": np.concatenate((columns, missing)),
            "mass_columns": mass_columns(work.tiles, self._group_size),
            "rows": work.row_blocks.columns,
        }
        formats = {format_ for k in used for format_ in kinds[k].formats}
        plain = [format_ for format_ in (F16, BF16) if format_ in formats]
        if len(plain) == 2:
            raise ValueError("pages of BF16 and of F16 in one plan")
        self.scratch = Scratch.reserve(space, num_tiles, work.cuts, formats, geometry)
        rows = Rows(num_rows, num_heads, query_bits)
        self._launches = Launches(space, self.scratch, space.load(arrays), rows, geometry, device)
        kernels = tuple((cut.tiled, cut.cohort) for cut in work.cuts)
        self.signature: Hashable = None if limits is None else (num_rows, kernels)
        self._attentions: dict[tuple[int, bool], tuple[_Attention, ...]] = {}
        num_prepared = most_tiles * geometry.num_kv_heads
        self._prepare = None
        if num_prepared:
            self._prepare = self._launches.prepare(
                num_prepared, tuple(used), plain_bf16=plain == [BF16]
            )
        self._merges = [self._launches.merge(cut) for cut in work.cuts]

    @property
    def scratch_bytes(self) -> int:
        """Device memory held: work lists, query fragments, partials."""
        return self._space.num_bytes

    def run(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        layer: int,
        scale: float,
        page_mass: bool,
        rotation: Rotation | None,
        elsewhere: State | None = None,
    ) -> AttentionOutput:
        """``run_decode``; shapes are checked by the caller.

        With ``rotation``, queries are given and outputs returned unrotated.
        """
        q = _aligned((q if q.dtype in DTYPES else q.float()).contiguous())
        out = State(
            torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        )
        mass = None
        if page_mass:
            if self._space.limits is not None:
                raise ValueError("page mass needs a plan with memory of its own")
            shape = self._num_entries, self._num_heads
            mass = torch.empty(shape, dtype=torch.float32, device=q.device)
        if elsewhere is not None:
            elsewhere = State(elsewhere.out.to(q.dtype).contiguous(), elsewhere.lse.contiguous())
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if self._prepare is not None:
            set_queries(self._prepare, q, scale, rotation)
            self._prepare.call(stream)
        for attention in self._layer_attentions(layer, page_mass):
            set_pages(attention.launch, arena.data_ptr() + attention.offset, mass)
            attention.launch.call(stream)
        merge = self._merges[self._layer_cuts[layer].number]
        set_output(merge, out, rotation, elsewhere)
        merge.call(stream)
        if mass is not None and mass.numel():
            self._launches.normalise(mass, self._entry_rows, out.lse).call(stream)
        return AttentionOutput(*out, mass)

    def _grid(self, work: Work, kind_index: int, format_: Format) -> Grid:
        """Thread blocks that run at the same time: what the very kernels launched allow."""
        processors = num_processors(self._device)
        variant = decode_variant(format_, self._geometry, self._query_bits)
        function = variant.load(kernel_name(variant, False), self._device)
        is_shared = has_cohorts(format_) and work.has_cohorts(kind_index)
        return Grid(
            function.blocks_per_multiprocessor() * processors,
            processors if is_shared else 0,
            # Over TQ pages each warp of a block takes a page, over rows a quarter of each.
            WARPS if isinstance(format_, TQ) else 1,
        )

    def _layer_attentions(self, layer: int, page_mass: bool) -> tuple[_Attention, ...]:
        key = layer, page_mass
        found = self._attentions.get(key)
        if found is None:
            cut = self._layer_cuts[layer]
            work = [(True, k) for k in cut.cohort] + [(False, k) for k in cut.tiled]
            found = self._attentions[key] = tuple(
                self._attention(layer, page_mass, cut, kind, is_cohort, chained=place > 0)
                for place, (is_cohort, kind) in enumerate(work)
            )
        return found

    def _attention(
        self,
        layer: int,
        page_mass: bool,
        cut: Cut,
        kind_index: int,
        is_cohort: bool,
        *,
        chained: bool,
    ) -> _Attention:
        kind = self._kinds[kind_index]
        launch = self._launches.attention(
            kind.formats[layer],
            cut,
            kind_index,
            page_mass=page_mass,
            is_cohort=is_cohort,
            chained=chained,
        )
        return _Attention(launch, kind.layer_offset(layer, self._geometry))

    @cached_property
    def _entry_rows(self) -> torch.Tensor:
        """int32 [entries]: made when page mass is first asked for, as it may be long."""
        return upload(entry_rows(self._table), torch.int32, self._device)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that begins at a multiple of 16 bytes, as vectors of it must."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
