"""Memory of decode plans: lists come where they were, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minima_kernels import KVGeometry
from minima_kernels.cuda.space import DecodeLimits, DecodeSpace, SpaceExceeded

CPU = torch.device("cpu")
LIMITS = DecodeLimits.of(16, 1000, 32, 2, KVGeometry(4, 8, 128, 64))


def lists(seed: int, pages: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    sizes = {"pages": pages, "items 0 0": 80, "item_start 0 0": 9, "items 0 1": 8 * seed}
    return {name: generator.integers(0, 1 << 30, size) for name, size in sizes.items()}


def test_lists_keep_their_places() -> None:
    space = DecodeSpace(CPU, LIMITS)
    places = None
    for seed in range(1, 6):
        arrays = lists(seed, 100 * seed)
        loaded = space.load(arrays)
        for name, array in arrays.items():
            assert loaded[name][: len(array)].tolist() == array.tolist()
            assert loaded[name].data_ptr() % 16 == space.load(arrays)["pages"].data_ptr() % 16
        now = {name: loaded[name].data_ptr() for name in arrays}
        assert places in (None, now)
        places = now
    assert space.num_bytes > 4 * 1000


def test_a_plan_of_its_own_has_exactly_its_size() -> None:
    space = DecodeSpace(CPU)
    arrays = lists(3, 50)
    loaded = space.load(arrays)
    for name, array in arrays.items():
        assert loaded[name][: len(array)].tolist() == array.tolist()
    assert space.num_bytes == 4 * sum(-(-len(array) // 4) * 4 for array in arrays.values())


def test_too_large_plans_are_refused() -> None:
    space = DecodeSpace(CPU, LIMITS)
    with pytest.raises(SpaceExceeded, match="1001 numbers of pages"):
        space.load(lists(1, 1001))
    with pytest.raises(SpaceExceeded, match="another list"):
        space.load({f"items 0 {i}": np.zeros(8, np.int32) for i in range(50)})
    kept = space.buffer("partials", 5, 8, 64, torch.float32)
    assert kept.shape == (64, 8)
    assert space.buffer("partials", 64, 8, 64, torch.float32) is kept
    with pytest.raises(SpaceExceeded, match="65 partials, room for 64"):
        space.buffer("partials", 65, 8, 64, torch.float32)


@pytest.mark.parametrize("num_heads", [8, 32, 128])
def test_tiles_of_few_rows_are_few(num_heads: int) -> None:
    limits = DecodeLimits.of(64, 10, num_heads, 2, KVGeometry(4, 8, 128, 64))
    counts = [limits.tiles_of(rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert counts == sorted(counts) and counts[-1] == limits.tiles
    blocks = -(-num_heads // 8 // 8)
    assert all(count >= 4 * rows * blocks or count >= 8 for count, rows in
               zip(counts, (1, 2, 4, 8, 16, 32, 64), strict=True))  # fmt: skip
    assert limits.ints_of("items 0 1") == 8 * limits.items
    assert limits.ints_of("unknown") == 0
