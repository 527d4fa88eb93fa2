"""Byte accounting of formats and kinds against closed formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from minima_kernels import BF16, F32, FP8, GRANULE, TQ, TQ3, Format, KVGeometry, PageKind
from minima_kernels.formats import parse_format
from minima_kernels.packing import word_shape

WIDE = KVGeometry(num_layers=2, num_kv_heads=8, head_dim=128, page_size=64)
SMALL = KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, page_size=64)
LARGE = KVGeometry(num_layers=16, num_kv_heads=4, head_dim=256, page_size=1792)


@pytest.mark.parametrize(
    ("format_", "geometry", "bits"),
    [
        (BF16, WIDE, 16),
        (F32, WIDE, 32),
        (FP8, WIDE, 8.125),
        (FP8, SMALL, 8.25),
        # Codes, a scale per row, and the key mean: 2 D bytes per page and head.
        (TQ(8, 8, centred=False), WIDE, 3.125),
        (TQ3, WIDE, 3.125 + 0.125),
        (TQ(16, 4), WIDE, 3.125 + 0.125),
        (TQ(8, 4), WIDE, 2.5 + 0.125 + 0.125),
        (TQ3, SMALL, 3.25 + 0.125),
        (TQ(8, 8, centred=False), LARGE, 3.0625),
    ],
)
def test_bits_per_value(format_: Format, geometry: KVGeometry, bits: float) -> None:
    assert format_.bits_per_value(geometry) == bits


@pytest.mark.parametrize("geometry", [WIDE, SMALL, LARGE])
def test_tq3_bytes_follow_the_closed_formula(geometry: KVGeometry) -> None:
    heads, dim, size = geometry.num_kv_heads, geometry.head_dim, geometry.page_size
    assert TQ3.layer_bytes(geometry) == heads * (size * (6 * dim // 8 + 4) + 2 * dim)


@pytest.mark.parametrize("levels", range(2, 17))
def test_codes_cost_what_their_words_cost(levels: int) -> None:
    codes, bits = word_shape(levels)
    expected = bits / codes + 0.125
    actual = TQ(levels, levels, centred=False).bits_per_value(WIDE)
    assert expected <= actual <= expected + 0.02


@pytest.mark.parametrize("name", ["bf16", "f32", "fp8", "tq3", "tq(5,7)", "tq(3,2,uncentred)"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 64), (5, 80), (8, 128)])
def test_parts_add_up_to_the_page(name: str, page_size: int, heads: int, dim: int) -> None:
    geometry = KVGeometry(3, heads, dim, page_size)
    format_ = parse_format(name)
    layout = format_.layout(geometry)
    parts = [layout.k_codes, layout.v_codes, layout.k_scales, layout.v_scales, layout.k_mean]
    spans = sorted(
        (part.offset, part.offset + heads * part.head_bytes) for part in parts if part is not None
    )
    assert spans[0][0] == 0
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert spans[-1][1] <= format_.layer_bytes(geometry)
    assert format_.layer_bytes(geometry) % 16 == 0

    kind = PageKind.uniform("kind", format_, 3)
    account = kind.account(geometry)
    assert sum(account.values()) == kind.bytes_per_page(geometry)
    assert account["codes"] == 3 * heads * (layout.k_codes.head_bytes + layout.v_codes.head_bytes)
    has_scales = name.startswith(("fp8", "tq"))
    assert account["scales"] == (3 * 2 * heads * page_size * 2 if has_scales else 0)
    assert account["means"] == (3 * heads * dim * 2 if name in ("tq3", "tq(5,7)") else 0)
    assert account["padding"] >= 0


def test_kinds_are_page_first_and_padded_to_granules() -> None:
    kind = PageKind.uniform("stale", TQ3, 30)
    share = TQ3.layer_bytes(SMALL)
    assert [kind.layer_offset(layer, SMALL) for layer in range(30)] == [
        layer * share for layer in range(30)
    ]
    assert kind.bytes_per_page(SMALL) == math.ceil(30 * share / GRANULE) * GRANULE
    assert kind.granules(SMALL) * GRANULE == kind.bytes_per_page(SMALL)
    values = 30 * 2 * 64 * 3 * 64
    assert kind.bits_per_value(SMALL) == kind.bytes_per_page(SMALL) * 8 / values


def test_boundary_layers_may_keep_another_format() -> None:
    kind = PageKind.uniform("stale", TQ3, 30)
    mixed = kind.with_layers(FP8, [0, 1, -2, -1], name="careful")
    assert mixed.name == "careful"
    assert mixed.formats == (FP8, FP8, *[TQ3] * 26, FP8, FP8)
    assert kind.formats == (TQ3,) * 30
    fp8, tq3 = FP8.layer_bytes(SMALL), TQ3.layer_bytes(SMALL)
    assert mixed.layer_offset(5, SMALL) == 2 * fp8 + 3 * tq3
    assert mixed.layer_offset(29, SMALL) == 3 * fp8 + 26 * tq3
    assert mixed.bytes_per_page(SMALL) == math.ceil((4 * fp8 + 26 * tq3) / GRANULE) * GRANULE


def test_kinds_are_values() -> None:
    kind = PageKind.uniform("a", TQ3, 2)
    kind.layer_offset(0, WIDE)
    assert kind == PageKind("a", (TQ3, TQ3))
    assert hash(kind) == hash(PageKind("a", (TQ3, TQ3)))
    assert kind != PageKind("b", (TQ3, TQ3))
    assert not kind.appendable
    assert PageKind.uniform("r", FP8, 2).appendable
    assert not PageKind("m", (FP8, TQ3)).appendable


def test_a_kind_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="layers"):
        PageKind.uniform("a", TQ3, 3).layer_offset(0, WIDE)


@pytest.mark.parametrize(
    "sizes", [(0, 1, 64, 16), (1, 0, 64, 16), (1, 1, 0, 16), (1, 1, 64, 0), (1, 1, 36, 16)]
)
def test_impossible_geometries_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError):
        KVGeometry(*sizes)
