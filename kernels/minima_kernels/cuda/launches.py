"""The launches of a decode plan: which kernel, with which grid, over which memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch

from minima_kernels.attention.merge import State
from minima_kernels.cuda.driver import Argument, Launch
from minima_kernels.cuda.scratch import Scratch
from minima_kernels.cuda.space import DecodeSpace
from minima_kernels.cuda.variants import (
    DTYPES,
    MERGE_BLOCKS,
    MERGE_SPLITS,
    MERGE_THREADS,
    Variant,
    cohort_variant,
    decode_variant,
    mass_variant,
    merge_variant,
    prepare_variant,
)
from minima_kernels.cuda.work import Cut
from minima_kernels.formats import FP8, TQ, Format
from minima_kernels.geometry import KVGeometry
from minima_kernels.rotation import Rotation

_LOG2_E = 1.4426950408889634

# Arguments that change from run to run, by place.
_PREPARE_Q, _PREPARE_DTYPE, _PREPARE_SCALE, _PREPARE_ROTATE, _PREPARE_SIGNS = 0, 1, 5, 6, 7
_ATTEND_SHARE, _ATTEND_MASS = 0, -5
_MERGE_ROTATE, _MERGE_SIGNS, _MERGE_OUT, _MERGE_DTYPE, _MERGE_LSE = 7, 8, 9, 10, 11
_MERGE_OTHER_OUT, _MERGE_OTHER_LSE = 12, 13


class Rows(NamedTuple):
    """What a plan is for: query rows, query heads, bits of a query's integers."""

    num_rows: int
    num_heads: int
    query_bits: int


class Launches:
    """Makes launches over a plan's memory, each once for the space that holds it."""

    def __init__(
        self,
        space: DecodeSpace,
        scratch: Scratch,
        address: Mapping[str, torch.Tensor],
        rows: Rows,
        geometry: KVGeometry,
        device: torch.device,
    ) -> None:
        """``address``: the work lists, by name."""
        self._space, self._scratch, self._address = space, scratch, address
        self._rows, self._geometry, self._device = rows, geometry, device
        self._group_size = rows.num_heads // geometry.num_kv_heads

    def _once(self, key: Hashable, make: Callable[[], Launch]) -> Launch:
        """The launch over the space's memory that was made before under this key, or a new one."""
        found = self._space.launches.get(key)
        if found is None:
            found = self._space.launches[key] = make()
        return found

    def prepare(self, num_tiles: int, used: tuple[int, ...], *, plain_bf16: bool) -> Launch:
        """Query fragments of so many tiles and KV heads, for the kinds ``used``."""
        scratch = self._scratch

        def make() -> Launch:
            function = prepare_variant(self._geometry).load("prepare", self._device)
            arguments: list[Argument] = [
                None,
                0,
                self._address["prepare_columns"],
                self._geometry.num_kv_heads,
                self._group_size,
                0.0,
                0,
                None,
                scratch.q_bytes,
                scratch.plane,
                scratch.pieces,
                scratch.plain,
                int(plain_bf16),
                scratch.q_scale,
            ]
            return Launch(function, (num_tiles, 1), arguments, overlaps=True)

        return self._once(("prepare", self._rows.num_rows, used), make)

    def attention(
        self,
        format_: Format,
        cut: Cut,
        kind_index: int,
        *,
        page_mass: bool,
        is_cohort: bool,
        chained: bool,
    ) -> Launch:
        """Attention to the pages of a kind. ``chained``: after another one of the same run."""
        key = "attend", format_, page_mass, cut.number, kind_index, is_cohort, chained

        def make() -> Launch:
            scratch, geometry = self._scratch, self._geometry
            name = f"{cut.number} {kind_index}"
            grid = cut.grids[kind_index].tiled
            pages = self._address["pages"]
            partials: list[Argument] = [scratch.part_o, scratch.part_ml]
            columns = self._address["mass_columns"]
            arguments: list[Argument] = [None]
            variant = decode_variant(format_, geometry, self._rows.query_bits)
            if is_cohort:
                variant = cohort_variant(format_, geometry, self._rows.query_bits)
                name, grid = f"cohort {name}", cut.grids[kind_index].cohort
                columns = self._address["rows"]
                ml = scratch.part_ml[cut.first_row_partial :]
                partials = [scratch.part_rows, ml, scratch.part_step]
            if isinstance(format_, TQ):
                arguments += [pages, scratch.q_bytes, scratch.plane]
                arguments += [] if is_cohort else [scratch.pieces]
            else:
                layout = format_.layout(geometry)
                scales = layout.k_scales, layout.v_scales
                offsets = [0 if part is None else part.offset for part in scales]
                fragments = scratch.pieces if format_ == FP8 else scratch.plain
                arguments += [layout.v_codes.offset, *offsets, pages, fragments]
            arguments += [
                scratch.q_scale,
                columns,
                self._address[f"item_start {name}"],
                self._address[f"items {name}"],
                *partials,
                None,
                self._rows.num_heads,
                self._group_size,
                geometry.num_kv_heads,
                int(chained),
            ]
            function = variant.load(kernel_name(variant, page_mass), self._device)
            return Launch(function, (grid, 1), arguments, overlaps=True)

        return self._once(key, make)

    def merge(self, cut: Cut) -> Launch:
        """The merge of a cut's partials."""
        units = self._rows.num_rows * self._rows.num_heads

        def make() -> Launch:
            function = self._merge_variant(units).load("merge", self._device)
            arguments: list[Argument] = [
                self._scratch.part_o,
                self._scratch.part_rows,
                self._scratch.part_step,
                self._scratch.part_ml,
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

        return self._once(("merge", self._rows.num_rows, cut.number), make)

    def _merge_variant(self, units: int) -> Variant:
        """The merge with the most threads per unit with which all units are merged at once."""
        for split in MERGE_SPLITS:
            variant = merge_variant(self._geometry, split)
            blocks = min(MERGE_BLOCKS, MERGE_THREADS // variant.threads[0])
            if units <= num_processors(self._device) * blocks:
                break
        return variant

    def normalise(self, mass: torch.Tensor, entry_rows: torch.Tensor, lse: torch.Tensor) -> Launch:
        """Page sums ``mass [entries, heads]`` to shares of their rows; not kept."""
        function = mass_variant(self._geometry).load("normalise_mass", self._device)
        arguments: list[Argument] = [mass, entry_rows, lse, *mass.shape]
        return Launch(function, (-(-mass.numel() // 256), 1), arguments, overlaps=True)


def set_queries(launch: Launch, q: torch.Tensor, scale: float, rotation: Rotation | None) -> None:
    """What ``prepare`` reads: queries, the factor on their scores, their change of basis."""
    launch.set(_PREPARE_Q, q.data_ptr())
    launch.set(_PREPARE_DTYPE, DTYPES[q.dtype])
    launch.set(_PREPARE_SCALE, scale * _LOG2_E)
    launch.set(_PREPARE_ROTATE, int(rotation is not None))
    launch.set(_PREPARE_SIGNS, _signs(rotation))


def set_pages(launch: Launch, address: int, mass: torch.Tensor | None) -> None:
    """What an attention kernel reads, the arena from a layer's first byte on, and where page sums
    go."""
    launch.set(_ATTEND_SHARE, address)
    if mass is not None:
        launch.set(_ATTEND_MASS, mass.data_ptr())


def set_output(
    launch: Launch, out: State, rotation: Rotation | None, elsewhere: State | None
) -> None:
    """Where ``merge`` writes, and what it merges along."""
    launch.set(_MERGE_ROTATE, int(rotation is not None))
    launch.set(_MERGE_SIGNS, _signs(rotation))
    launch.set(_MERGE_OUT, out.out.data_ptr())
    launch.set(_MERGE_DTYPE, DTYPES[out.out.dtype])
    launch.set(_MERGE_LSE, out.lse.data_ptr())
    launch.set(_MERGE_OTHER_OUT, 0 if elsewhere is None else elsewhere.out.data_ptr())
    launch.set(_MERGE_OTHER_LSE, 0 if elsewhere is None else elsewhere.lse.data_ptr())


def _signs(rotation: Rotation | None) -> int:
    signs = None if rotation is None else rotation.signs
    return 0 if signs is None else signs.data_ptr()


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def kernel_name(variant: Variant, page_mass: bool) -> str:
    """An attention kernel has the name of its source."""
    return variant.source.removesuffix(".cu") + "_mass" * page_mass
