"""Pages in a poisoned arena, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minima_kernels import GRANULE, KVGeometry, PageKind, Segment, parse_format
from minima_kernels.attention.reference import cached_tokens, dense_attention
from minima_kernels.cuda.scratch import Scratch
from minima_kernels.formats import AppendableFormat

POISON = 0xFF


class Pages:
    """Allocates pages of several kinds in an arena whose free bytes are all 0xFF.

    0xFF is a NaN in every float dtype and in every FP16 scale: whatever reads a byte that was
    not written shows it.
    """

    def __init__(self, geometry: KVGeometry, formats: Sequence[str], seed: int = 0) -> None:
        self.geometry = geometry
        self.kinds = [
            PageKind.uniform(name, parse_format(name), geometry.num_layers) for name in formats
        ]
        self.arena = torch.full((1 << 16,), POISON, dtype=torch.uint8)
        self.generator = torch.Generator().manual_seed(seed)
        self._next = 1

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _allocate(self, kind: PageKind) -> int:
        address = self._next
        # A hole after every page: a read past a page's end meets poison.
        self._next += kind.granules(self.geometry) + 1
        while self.arena.numel() < self._next * GRANULE:
            self.arena = torch.cat((self.arena, torch.full_like(self.arena, POISON)))
        return address

    def page(self, kind_index: int, num_tokens: int | None = None) -> int:
        """A page of random content; only its first ``num_tokens`` tokens where that is given."""
        geometry = self.geometry
        kind = self.kinds[kind_index]
        address = self._allocate(kind)
        for layer, format_ in enumerate(kind.formats):
            shape = geometry.page_size, geometry.num_kv_heads, geometry.head_dim
            # Keys with a constant component, as real ones have.
            k = self.random(*shape) + self.random(1, *shape[1:])
            v = self.random(*shape)
            start = address * GRANULE + kind.layer_offset(layer, geometry)
            if num_tokens is None or num_tokens == geometry.page_size:
                data = format_.encode(k[None], v[None], geometry)[0]
                self.arena[start : start + len(data)] = data
            else:
                assert isinstance(format_, AppendableFormat)
                starts = torch.full((num_tokens,), start)
                slots = torch.arange(num_tokens)
                format_.append(self.arena, starts, slots, k[:num_tokens], v[:num_tokens], geometry)
        return address

    def segment(
        self, kind_index: int, num_pages: int, readers: Sequence[int], last_page_len: int = 0
    ) -> Segment:
        """A run of new pages; the last holds ``last_page_len`` tokens unless that is 0."""
        last = last_page_len or self.geometry.page_size
        addresses = [self.page(kind_index) for _ in range(num_pages - 1)]
        addresses.append(self.page(kind_index, last))
        return Segment(addresses, kind_index, last, list(readers))

    def reference(
        self,
        segments: Sequence[Segment],
        request: int,
        q: torch.Tensor,
        layer: int,
        scale: float,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense float64 attention of ``q [n, Hq, D]`` over the decoded pages of a request."""
        k, v = cached_tokens(segments, request, self.kinds, self.geometry, self.arena, layer)
        if new is None:
            return dense_attention(q, k, v, scale)
        k, v = torch.cat((k, new[0])), torch.cat((v, new[1]))
        return dense_attention(q, k, v, scale, causal=True)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def poison(scratch: Scratch) -> None:
    """Fills what the kernels hand to each other: nothing may be read before it is written."""
    for floats in (scratch.q_scale, scratch.part_o, scratch.part_step, scratch.part_ml):
        floats.fill_(torch.nan)
    for words in (scratch.q_bytes, scratch.pieces, scratch.plain, scratch.part_rows):
        if words is not None:
            words.fill_(-1)
