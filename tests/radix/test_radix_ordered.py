"""The blocks of ordered keys are one sorted list to the outside."""

from __future__ import annotations

from bisect import bisect_left, insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minima_radix import ordered
from minima_radix.ordered import OrderedKeys

KEYS = st.binary(min_size=1, max_size=3)


@given(actions=st.lists(st.tuples(st.booleans(), KEYS), max_size=120), block=st.integers(2, 6))
def test_neighbours_equal_those_of_a_sorted_list(
    actions: list[tuple[bool, bytes]], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "_BLOCK", block)
        keys, expected = OrderedKeys(), list[bytes]()
        for add, key in actions:
            if add and key not in expected:
                keys.add(key)
                insort(expected, key)
            elif not add and expected:
                gone = expected.pop(bisect_left(expected, key) % len(expected))
                keys.remove(gone)
            place = bisect_left(expected, key)
            assert keys.neighbours(key) == expected[max(place - 1, 0) : place + 1]
            assert len(keys) == len(expected)


def test_no_change_moves_more_than_a_block() -> None:
    keys = OrderedKeys()
    for number in range(20_000):
        keys.add((number * 7919 % 20_011).to_bytes(4, "big"))
    assert max(map(len, keys._blocks)) <= ordered._BLOCK
    assert len(keys._blocks) < 20_000 // (ordered._BLOCK // 4)
