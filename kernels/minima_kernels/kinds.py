"""Page kinds: the format of every layer of a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from minima_kernels.formats import Format
from minima_kernels.geometry import GRANULE, KVGeometry, align


@dataclass(frozen=True)
class PageKind:
    """One format per layer. A page of a kind holds the layers' shares one after the other.

    Methods that take a geometry raise ``ValueError`` when its layer count is another one.
    """

    name: str
    formats: tuple[Format, ...]
    _offsets: dict[KVGeometry, tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def uniform(cls, name: str, format_: Format, num_layers: int) -> PageKind:
        """The same format in every layer."""
        return cls(name, (format_,) * num_layers)

    def with_layers(
        self, format_: Format, layers: Iterable[int], name: str | None = None
    ) -> PageKind:
        """This kind with ``format_`` in the given layers (negative ones count from the end).

        Raises:
            IndexError: no such layer.
        """
        formats = list(self.formats)
        for layer in layers:
            formats[layer] = format_
        return PageKind(self.name if name is None else name, tuple(formats))

    def __hash__(self) -> int:
        # Kinds are keys of what is looked up in every step, and names tell them apart.
        return hash(self.name)

    @cached_property
    def distinct_formats(self) -> frozenset[Format]:
        """The formats without repetition."""
        return frozenset(self.formats)

    @property
    def appendable(self) -> bool:
        """Whether every layer takes single token rows."""
        return all(format_.appendable for format_ in self.formats)

    def _layer_offsets(self, geometry: KVGeometry) -> tuple[int, ...]:
        """Byte offset of each layer's share, then the end of the last one."""
        offsets = self._offsets.get(geometry)
        if offsets is None:
            if len(self.formats) != geometry.num_layers:
                raise ValueError(
                    f"kind {self.name!r} has {len(self.formats)} layers, "
                    f"the model {geometry.num_layers}"
                )
            sizes = (format_.layer_bytes(geometry) for format_ in self.formats)
            offsets = self._offsets[geometry] = tuple(accumulate(sizes, initial=0))
        return offsets

    def layer_offset(self, layer: int, geometry: KVGeometry) -> int:
        """Bytes from the start of the page to the layer's share."""
        return self._layer_offsets(geometry)[layer]

    def bytes_per_page(self, geometry: KVGeometry) -> int:
        """Bytes of a page, padding to a whole number of granules included."""
        return align(self._layer_offsets(geometry)[-1], GRANULE)

    def granules(self, geometry: KVGeometry) -> int:
        """Size of a page in granules."""
        return self.bytes_per_page(geometry) // GRANULE

    def bits_per_value(self, geometry: KVGeometry) -> float:
        """Bits per stored value, every byte of the page counted."""
        return self.bytes_per_page(geometry) * 8 / (geometry.values_per_layer * len(self.formats))

    def account(self, geometry: KVGeometry) -> dict[str, int]:
        """Bytes of a page by purpose: codes, scales, means, padding; they sum to the page."""
        total = {"codes": 0, "scales": 0, "means": 0, "padding": 0}
        for format_ in self.formats:
            for purpose, size in format_.layout(geometry).account(geometry).items():
                total[purpose] += size
        total["padding"] += self.bytes_per_page(geometry) - self._layer_offsets(geometry)[-1]
        return total
