"""Decode attention on a GPU: a plan as launches with fixed addresses, and their run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.merge import State
from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.segments import SegmentTable
from minima_kernels.cuda.cohort_plan import ROWS
from minima_kernels.cuda.driver import Argument, Launch
from minima_kernels.cuda.plan import (
    COLUMNS,
    entry_rows,
    mass_columns,
    prepare_columns,
)
from minima_kernels.cuda.space import DecodeSpace, SpaceExceeded
from minima_kernels.cuda.variants import (
    DTYPES,
    MERGE_BLOCKS,
    MERGE_SPLITS,
    MERGE_THREADS,
    WARPS,
    Variant,
    cohort_variant,
    decode_variant,
    has_cohorts,
    mass_variant,
    merge_variant,
    prepare_variant,
)
from minima_kernels.cuda.work import Cut, Grid, Work
from minima_kernels.formats import BF16, F16, FP8, TQ, Format
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.rotation import Rotation
from minima_kernels.upload import upload

_LOG2_E = 1.4426950408889634

# Arguments that change from run to run, by place.
_PREPARE_Q, _PREPARE_DTYPE, _PREPARE_SCALE, _PREPARE_ROTATE, _PREPARE_SIGNS = 0, 1, 5, 6, 7
_ATTEND_SHARE, _ATTEND_MASS = 0, -5
_MERGE_ROTATE, _MERGE_SIGNS, _MERGE_OUT, _MERGE_DTYPE, _MERGE_LSE = 7, 8, 9, 10, 11
_MERGE_OTHER_OUT, _MERGE_OTHER_LSE = 12, 13


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
        dim, heads = geometry.head_dim, geometry.num_kv_heads
        self._prepared = most_tiles * heads
        self._plane = plane = (num_tiles if limits is None else limits.tiles) * heads
        tile_slots = max((cut.num_tile_slots for cut in work.cuts), default=0)
        row_slots = max((cut.num_row_slots for cut in work.cuts), default=0)
        first_rows = max((cut.first_row_partial for cut in work.cuts), default=0)
        most_rows = row_slots if limits is None else limits.row_slots

        def buffer(
            name: str, count: int, width: int, most: int, dtype: torch.dtype = torch.int32
        ) -> torch.Tensor:
            return space.buffer(name, count, width, most, dtype)

        self._q_bytes = None
        if any(isinstance(format_, TQ) for format_ in formats):
            self._q_bytes = buffer("query bytes", 2 * plane, dim * 2, 2 * plane)
        self._pieces = buffer("query pieces", plane, dim * 8, plane)
        self._plain = buffer("query halves", plane, dim * 8, plane) if plain else None
        self._q_scale = buffer("query scales", plane, COLUMNS, plane, torch.float32)
        self._part_o = buffer(
            "partials",
            tile_slots * COLUMNS,
            dim,
            (tile_slots if most_slots is None else most_slots) * COLUMNS,
            torch.float32,
        )
        self._part_rows = buffer(
            "partials of rows", row_slots * ROWS, dim, most_rows * ROWS, torch.int16
        )
        self._part_step = buffer(
            "steps of rows", row_slots * ROWS, 1, most_rows * ROWS, torch.float32
        )
        self._part_ml = buffer(
            "partial sums",
            first_rows + row_slots * ROWS,
            2,
            first_rows + most_rows * ROWS,
            torch.float32,
        )
        self._address = space.load(arrays)
        kernels = tuple((cut.tiled, cut.cohort) for cut in work.cuts)
        self.signature: Hashable = None if limits is None else (num_rows, kernels)
        self._attentions: dict[tuple[int, bool], tuple[_Attention, ...]] = {}
        self._prepare = self._launch(
            ("prepare", num_rows, tuple(used)), lambda: self._make_prepare(plain == [BF16])
        )
        self._merges = [
            self._launch(("merge", num_rows, cut.number), partial(self._make_merge, cut))
            for cut in work.cuts
        ]

    def _launch(self, key: Hashable, make: Callable[[], Launch]) -> Launch:
        """The launch over the space's memory that was made before under this key, or a new one."""
        found = self._space.launches.get(key)
        if found is None:
            found = self._space.launches[key] = make()
        return found

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
        dtype = DTYPES[q.dtype]
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        mass = None
        if page_mass:
            if self._space.limits is not None:
                raise ValueError("page mass needs a plan with memory of its own")
            shape = self._num_entries, self._num_heads
            mass = torch.empty(shape, dtype=torch.float32, device=q.device)
        rotate = int(rotation is not None)
        signs = None if rotation is None else rotation.signs
        signs_address = 0 if signs is None else signs.data_ptr()
        stream = torch.cuda.current_stream(self._device).cuda_stream

        prepare = self._prepare
        prepare.set(_PREPARE_Q, q.data_ptr())
        prepare.set(_PREPARE_DTYPE, dtype)
        prepare.set(_PREPARE_SCALE, scale * _LOG2_E)
        prepare.set(_PREPARE_ROTATE, rotate)
        prepare.set(_PREPARE_SIGNS, signs_address)
        if self._prepared:
            prepare.call(stream)
        for attention in self._layer_attentions(layer, page_mass):
            attention.launch.set(_ATTEND_SHARE, arena.data_ptr() + attention.offset)
            if mass is not None:
                attention.launch.set(_ATTEND_MASS, mass.data_ptr())
            attention.launch.call(stream)
        merge = self._merges[self._layer_cuts[layer].number]
        merge.set(_MERGE_ROTATE, rotate)
        merge.set(_MERGE_SIGNS, signs_address)
        merge.set(_MERGE_OUT, out.data_ptr())
        merge.set(_MERGE_DTYPE, dtype)
        merge.set(_MERGE_LSE, lse.data_ptr())
        merge.set(_MERGE_OTHER_OUT, 0)
        merge.set(_MERGE_OTHER_LSE, 0)
        if elsewhere is not None:
            other_out, other_lse = (
                elsewhere.out.to(q.dtype).contiguous(),
                elsewhere.lse.contiguous(),
            )
            merge.set(_MERGE_OTHER_OUT, other_out.data_ptr())
            merge.set(_MERGE_OTHER_LSE, other_lse.data_ptr())
        merge.call(stream)
        if mass is not None and mass.numel():
            self._make_normalise(mass, lse).call(stream)
        return AttentionOutput(out, lse, mass)

    def _grid(self, work: Work, kind_index: int, format_: Format) -> Grid:
        """Thread blocks that run at the same time: what the very kernels launched allow."""
        processors = _processors(self._device)
        variant = decode_variant(format_, self._geometry, self._query_bits)
        function = variant.load(_kernel_name(variant, False), self._device)
        is_shared = has_cohorts(format_) and work.has_cohorts(kind_index)
        return Grid(
            function.blocks_per_multiprocessor() * processors,
            processors if is_shared else 0,
            # Over TQ pages each warp of a block takes a page, over rows a quarter of each.
            WARPS if isinstance(format_, TQ) else 1,
        )

    def _make_prepare(self, plain_bf16: bool) -> Launch:
        function = prepare_variant(self._geometry).load("prepare", self._device)
        arguments: list[Argument] = [None] * 13
        arguments[_PREPARE_DTYPE] = arguments[_PREPARE_ROTATE] = 0
        arguments[_PREPARE_SCALE] = 0.0
        arguments[2:5] = (
            self._address["prepare_columns"],
            self._geometry.num_kv_heads,
            self._group_size,
        )
        arguments[8:] = (
            self._q_bytes,
            self._plane,
            self._pieces,
            self._plain,
            int(plain_bf16),
        )
        arguments.append(self._q_scale)
        return Launch(function, (self._prepared, 1), arguments, overlaps=True)

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
        format_ = kind.formats[layer]
        launch = self._launch(
            ("attend", format_, page_mass, cut.number, kind_index, is_cohort, chained),
            lambda: self._make_attention(
                format_, page_mass, cut, kind_index, is_cohort, chained=chained
            ),
        )
        return _Attention(launch, kind.layer_offset(layer, self._geometry))

    def _make_attention(
        self,
        format_: Format,
        page_mass: bool,
        cut: Cut,
        kind_index: int,
        is_cohort: bool,
        *,
        chained: bool,
    ) -> Launch:
        geometry = self._geometry
        name = f"{cut.number} {kind_index}"
        grid = cut.grids[kind_index].tiled
        pages = self._address["pages"]
        partials: list[Argument] = [self._part_o, self._part_ml]
        columns = self._address["mass_columns"]
        arguments: list[Argument] = [None]
        variant = decode_variant(format_, geometry, self._query_bits)
        if is_cohort:
            variant = cohort_variant(format_, geometry, self._query_bits)
            name, grid = f"cohort {name}", cut.grids[kind_index].cohort
            columns = self._address["rows"]
            ml = self._part_ml[cut.first_row_partial :]
            partials = [self._part_rows, ml, self._part_step]
        if isinstance(format_, TQ):
            arguments += [pages, self._q_bytes, self._plane]
            arguments += [] if is_cohort else [self._pieces]
        else:
            layout = format_.layout(geometry)
            scales = layout.k_scales, layout.v_scales
            offsets = [0 if part is None else part.offset for part in scales]
            fragments = self._pieces if format_ == FP8 else self._plain
            arguments += [layout.v_codes.offset, *offsets, pages, fragments]
        arguments += [
            self._q_scale,
            columns,
            self._address[f"item_start {name}"],
            self._address[f"items {name}"],
            *partials,
            None,
            self._num_heads,
            self._group_size,
            geometry.num_kv_heads,
            int(chained),
        ]
        function = variant.load(_kernel_name(variant, page_mass), self._device)
        return Launch(function, (grid, 1), arguments, overlaps=True)

    def _make_merge(self, cut: Cut) -> Launch:
        units = self._num_rows * self._num_heads
        variant = self._merge_variant(units)
        function = variant.load("merge", self._device)
        arguments: list[Argument] = [
            self._part_o,
            self._part_rows,
            self._part_step,
            self._part_ml,
            cut.first_row_partial,
            self._address[f"unit_start {cut.number}"],
            self._address[f"unit_partials {cut.number}"],
            0,
            None,
            None,
            0,
            None,
            None,
            None,
        ]
        return Launch(function, (units, 1), arguments, overlaps=True)

    def _merge_variant(self, units: int) -> Variant:
        """The merge with the most threads per unit with which all units are merged at once."""
        for split in MERGE_SPLITS:
            variant = merge_variant(self._geometry, split)
            blocks = min(MERGE_BLOCKS, MERGE_THREADS // variant.threads[0])
            if units <= _processors(self._device) * blocks:
                break
        return variant

    @cached_property
    def _entry_rows(self) -> torch.Tensor:
        """int32 [entries]: made when page mass is first asked for, as it may be long."""
        return upload(entry_rows(self._table), torch.int32, self._device)

    def _make_normalise(self, mass: torch.Tensor, lse: torch.Tensor) -> Launch:
        function = mass_variant(self._geometry).load("normalise_mass", self._device)
        arguments: list[Argument] = [
            mass,
            self._entry_rows,
            lse,
            self._num_entries,
            self._num_heads,
        ]
        return Launch(function, (-(-mass.numel() // 256), 1), arguments, overlaps=True)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that begins at a multiple of 16 bytes, as vectors of it must."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _kernel_name(variant: Variant, page_mass: bool) -> str:
    """An attention kernel has the name of its source."""
    return variant.source.removesuffix(".cu") + "_mass" * page_mass
