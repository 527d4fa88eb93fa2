"""Device memory of decode plans: of one plan, or at fixed addresses for one plan after another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from minima_kernels.cuda.cohort_plan import ROWS
from minima_kernels.cuda.driver import Launch
from minima_kernels.cuda.plan import COLUMNS, Int32Array, IntArray, head_blocks, pack_arrays
from minima_kernels.geometry import KVGeometry
from minima_kernels.upload import upload

# Per row of a batch, on average: tiles of query columns, and segments that a tile reads.
_TILES_PER_ROW = 4
_READS_PER_ROW = 8

_MAX_BLOCKS = 2048
"""Thread blocks of a kernel at most: eight on each multiprocessor of twice an H200."""

_PAGES = "pages"


class SpaceExceeded(ValueError):
    """A plan does not fit the memory that was reserved for plans."""


@dataclass(frozen=True)
class DecodeLimits:
    """What the largest plan needs; every count is an upper bound.

    Attributes:
        rows: query rows.
        tiles: tiles of eight query columns.
        pages: pages read, each once for all its readers.
        items: pieces of work, all kinds together.
        partials: entries of the merge lists.
        units: (row, query head) pairs, and one.
        row_blocks: blocks of 64 stacked rows of cohorts.
        row_slots: blocks of partials of stacked rows.
    """

    rows: int
    tiles: int
    pages: int
    items: int
    partials: int
    units: int
    row_blocks: int
    row_slots: int

    @classmethod
    def of(
        cls, rows: int, pages: int, num_heads: int, num_kinds: int, geometry: KVGeometry
    ) -> DecodeLimits:
        """Limits of batches of up to ``rows`` requests over up to ``pages`` pages."""
        group_size = num_heads // geometry.num_kv_heads
        blocks = head_blocks(group_size)
        row_blocks = _TILES_PER_ROW * -(-rows * group_size // ROWS) + rows
        row_slots = 2 * (2 * row_blocks * geometry.num_kv_heads + num_kinds * _MAX_BLOCKS // 8)
        items = _READS_PER_ROW * rows * blocks * geometry.num_kv_heads + num_kinds * _MAX_BLOCKS
        return cls(
            rows,
            max(8, _TILES_PER_ROW * rows) * blocks,
            pages,
            items,
            items * COLUMNS + row_slots * ROWS,
            rows * num_heads + 1,
            row_blocks,
            row_slots,
        )

    def tiles_of(self, num_rows: int) -> int:
        """Tiles that a plan of so many rows may have."""
        return self.tiles if num_rows > self.rows else max(8, self.tiles * num_rows // self.rows)

    def ints_of(self, name: str) -> int:
        """Most int32 values of a work list."""
        sizes = {
            _PAGES: self.pages,
            "prepare_columns": COLUMNS * self.tiles,
            "mass_columns": COLUMNS * self.tiles,
            "items": 8 * self.items,
            "rows": ROWS * self.row_blocks,
            "item_start": _MAX_BLOCKS + 1,
            "unit_start": self.units,
            "unit_partials": self.partials,
        }
        return sizes.get(name.split()[0], 0)


class DecodeSpace:
    """Where plans keep their work lists, query fragments and partials on the device.

    Without limits: exactly what one plan needs. With limits it serves plan after plan, one at a
    time; nothing ever moves, so a CUDA graph captured over one plan may be replayed over another
    of the same ``CudaDecode.signature``. Loading a plan is ordered by the current stream.
    """

    def __init__(self, device: torch.device, limits: DecodeLimits | None = None) -> None:
        self.device = device
        self.limits = limits
        self.launches: dict[Hashable, Launch] = {}
        """Launches over this memory; they outlive the plan that made them."""
        self._buffers: dict[str, torch.Tensor] = {}
        self._lists: dict[str, torch.Tensor] = {}
        self._starts: dict[str, int] = {}
        self._end = 0
        self._ints: torch.Tensor | None = None
        self._staging: list[_Staging] = []

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        tensors = [*self._buffers.values()]
        if self._ints is not None:
            tensors.append(self._ints)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def buffer(
        self, name: str, count: int, width: int, most: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Memory ``[count, width]``; under limits ``[most, width]``, the same at every call.

        Raises:
            SpaceExceeded: more than ``most`` are asked for.
        """
        if self.limits is not None and count > most:
            raise SpaceExceeded(f"{count} {name}, room for {most}")
        found = self._buffers.get(name)
        if found is None:
            rows = count if self.limits is None else most
            found = torch.empty((rows, width), dtype=dtype, device=self.device)
            self._buffers[name] = found
        return found

    def load(self, arrays: Mapping[str, IntArray]) -> dict[str, torch.Tensor]:
        """Copy work lists to the device, as int32; returns where each starts.

        Raises:
            SpaceExceeded: a list is longer than the limits say.
        """
        if self.limits is None:
            return self._load_once(arrays)
        for name, array in arrays.items():
            if name not in self._starts:
                self._place(name)
            if array.size > self.limits.ints_of(name):
                raise SpaceExceeded(
                    f"{array.size} numbers of {name}, room for {self.limits.ints_of(name)}"
                )
        assert self._ints is not None
        self._stage().send(arrays, self._starts, self._ints)
        return self._lists

    def _load_once(self, arrays: Mapping[str, IntArray]) -> dict[str, torch.Tensor]:
        packed = pack_arrays(arrays)
        self._ints = ints = upload(packed.data, torch.int32, self.device)
        return {name: ints[start:] for name, start in packed.starts.items()}

    def _place(self, name: str) -> None:
        assert self.limits is not None
        if self._ints is None:
            self._ints = torch.zeros(self._total(), dtype=torch.int32, device=self.device)
        size = _aligned(self.limits.ints_of(name))
        if self._end + size > len(self._ints):
            raise SpaceExceeded(f"no room for another list {name!r}")
        self._starts[name] = self._end
        self._lists[name] = self._ints[self._end : self._end + size]
        self._end += size

    def _total(self) -> int:
        """Room for the lists of a few page kinds and cuts."""
        assert self.limits is not None
        sizes = {name: _aligned(self.limits.ints_of(name)) for name in _LIST_COUNTS}
        return sum(count * sizes[name] for name, count in _LIST_COUNTS.items())

    def _stage(self) -> _Staging:
        """The buffer of the load before the last one: that one is surely on the device."""
        assert self._ints is not None
        if len(self._staging) < 2:
            self._staging.insert(0, _Staging(len(self._ints), self.device))
        else:
            self._staging.reverse()
        return self._staging[0]


# Lists that a plan can have: of items two per kind and cut.
_LIST_COUNTS = {
    _PAGES: 1,
    "prepare_columns": 1,
    "mass_columns": 1,
    "rows": 1,
    "items": 12,
    "item_start": 12,
    "unit_start": 3,
    "unit_partials": 3,
}


class _Staging:
    """Pinned host memory that lists go through, and whether they have arrived."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=is_cuda)
        self._values: Int32Array = self._host.numpy()
        self._event = torch.cuda.Event() if is_cuda else None

    def send(
        self,
        arrays: Mapping[str, IntArray],
        starts: Mapping[str, int],
        ints: torch.Tensor,
    ) -> None:
        """Copy lists to their places in ``ints``, those that lie close together at once."""
        if self._event is not None:
            self._event.synchronize()
        runs: list[tuple[int, int]] = []
        for name, array in sorted(arrays.items(), key=lambda item: starts[item[0]]):
            start = starts[name]
            self._values[start : start + array.size] = array.ravel()
            if runs and start - runs[-1][1] <= _WORTH_A_COPY:
                runs[-1] = runs[-1][0], start + array.size
            else:
                runs.append((start, start + array.size))
        for start, stop in runs:
            ints[start:stop].copy_(self._host[start:stop], non_blocking=True)
        if self._event is not None:
            self._event.record()


_WORTH_A_COPY = 1 << 15
"""Numbers between two lists that are copied along rather than beginning another copy."""


def _aligned(size: int) -> int:
    """Lists start at multiples of 16 bytes."""
    return -(-size // 4) * 4
