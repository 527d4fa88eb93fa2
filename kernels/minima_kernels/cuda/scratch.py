"""What the kernels of a decode plan hand to each other, in device memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from minima_kernels.cuda.cohort_plan import ROWS
from minima_kernels.cuda.plan import COLUMNS
from minima_kernels.cuda.space import DecodeSpace
from minima_kernels.cuda.work import Cut
from minima_kernels.formats import BF16, F16, TQ, Format
from minima_kernels.geometry import KVGeometry


@dataclass(frozen=True)
class Scratch:
    """Query fragments and partials.

    Attributes:
        plane: tiles of queries and KV heads of one plane of ``q_bytes``.
        q_bytes: int32 ``[2 plane, 2 D]``, high and low bytes; none where no TQ pages are read.
        pieces: int32 ``[plane, 8 D]``: queries as sums of two 16-bit floats, in the order of pieces
            of FP8 rows.
        plain: the same in the plain order; none where no 16-bit pages are read.
        q_scale: float32 ``[plane, 8]``.
        part_o: float32 ``[slots * 8, D]``: partials of tiles.
        part_rows: int16 ``[slots * 64, D]``: partials of stacked rows, in steps of ``part_step``.
        part_step: float32 ``[slots * 64, 1]``.
        part_ml: float32 ``[partials, 2]``: reference and sum of each, of tiles and of rows.
    """

    plane: int
    q_bytes: torch.Tensor | None
    pieces: torch.Tensor
    plain: torch.Tensor | None
    q_scale: torch.Tensor
    part_o: torch.Tensor
    part_rows: torch.Tensor
    part_step: torch.Tensor
    part_ml: torch.Tensor

    @classmethod
    def reserve(
        cls,
        space: DecodeSpace,
        num_tiles: int,
        cuts: Sequence[Cut],
        formats: Collection[Format],
        geometry: KVGeometry,
    ) -> Scratch:
        """What a plan of so many tiles needs for its cuts; in a space with limits what those allow.

        Raises:
            SpaceExceeded: it needs more.
        """
        limits, dim = space.limits, geometry.head_dim
        tile_slots = max((cut.num_tile_slots for cut in cuts), default=0)
        row_slots = max((cut.num_row_slots for cut in cuts), default=0)
        first_rows = max((cut.first_row_partial for cut in cuts), default=0)
        most_tiles, most_slots, most_rows = num_tiles, tile_slots, row_slots
        if limits is not None:
            most_tiles, most_slots, most_rows = limits.tiles, limits.items, limits.row_slots
        plane = most_tiles * geometry.num_kv_heads

        def buffer(
            name: str, count: int, width: int, most: int, dtype: torch.dtype = torch.int32
        ) -> torch.Tensor:
            return space.buffer(name, count, width, most, dtype)

        has_tq = any(isinstance(format_, TQ) for format_ in formats)
        has_plain = BF16 in formats or F16 in formats
        rows, most_rows = row_slots * ROWS, most_rows * ROWS
        return cls(
            plane,
            buffer("query bytes", 2 * plane, dim * 2, 2 * plane) if has_tq else None,
            buffer("query pieces", plane, dim * 8, plane),
            buffer("query halves", plane, dim * 8, plane) if has_plain else None,
            buffer("query scales", plane, COLUMNS, plane, torch.float32),
            buffer("partials", tile_slots * COLUMNS, dim, most_slots * COLUMNS, torch.float32),
            buffer("partials of rows", rows, dim, most_rows, torch.int16),
            buffer("steps of rows", rows, 1, most_rows, torch.float32),
            buffer("partial sums", first_rows + rows, 2, first_rows + most_rows, torch.float32),
        )
