"""Random nested sharing: who reads which run of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

_LEVELS = 4


def draw_readers(data: st.DataObject, requests: Sequence[int]) -> Iterator[list[int]]:
    """The readers of each run of a tree: a node has up to two, its children part its readers."""

    def grow(readers: list[int], level: int) -> Iterator[list[int]]:
        if not readers or level == _LEVELS:
            return
        for _ in range(data.draw(st.integers(0, 2))):
            yield readers
        cut = data.draw(st.integers(0, len(readers)))
        yield from grow(readers[:cut], level + 1)
        yield from grow(readers[cut:], level + 1)

    yield from grow(data.draw(st.permutations(requests)), 0)
