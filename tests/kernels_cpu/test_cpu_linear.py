"""Linear layers over weight blocks: every level against float64, threads, batches, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minima_kernels.cpu.library import available_levels, force_level
from minima_kernels.cpu.linear import (
    BLOCK,
    BlockKind,
    BlockMatrix,
    Input,
    pack,
    panel_bytes,
    rotate,
)

VARIANTS = [(BlockKind.Q4, 8), (BlockKind.Q4, 16), (BlockKind.Q8, 16)]
LIMITS = {8: 127.0, 16: 32767.0}


class Case(NamedTuple):
    matrix: BlockMatrix
    weight: torch.Tensor
    """float64 [outputs, inputs]: what the blocks stand for."""
    magnitude: torch.Tensor
    """float64 [outputs, inputs]: of the terms that a weight is the sum of."""
    bias: torch.Tensor | None


def make_case(
    kind: BlockKind, bits: Any, outputs: int, inputs: int, bias: bool = False, seed: int = 0
) -> Case:
    rng = np.random.default_rng([seed, outputs, inputs, kind])
    scales = (0.1 * rng.standard_normal((outputs, inputs // BLOCK))).astype(np.float16)
    wide = np.repeat(scales.astype(np.float64), BLOCK, axis=1)
    if kind == BlockKind.Q4:
        codes: np.ndarray[Any, Any] = rng.integers(0, 16, (outputs, inputs), dtype=np.uint8)
        minima = (-7 * scales + 0.01 * rng.standard_normal(scales.shape)).astype(np.float16)
        offset = np.repeat(minima.astype(np.float64), BLOCK, axis=1)
        panels = pack(codes, scales, minima)
    else:
        codes = rng.integers(-128, 128, (outputs, inputs), dtype=np.int8)
        offset = np.zeros_like(wide)
        panels = pack(codes, scales)
    added = torch.from_numpy(rng.standard_normal(outputs).astype(np.float32)) if bias else None
    matrix = BlockMatrix(kind, outputs, inputs, torch.from_numpy(panels), added, bits)
    product = codes * wide
    magnitude = torch.from_numpy(np.abs(product) + np.abs(offset))
    return Case(matrix, torch.from_numpy(product + offset), magnitude, added)


def rounded(x: torch.Tensor, limit: float) -> torch.Tensor:
    """float64: activations as the kernels round them."""
    groups = x.unflatten(1, (-1, BLOCK))
    top = groups.abs().amax(-1, keepdim=True)
    codes = (groups * torch.where(top > 0, torch.full_like(top, limit) / top, 0.0)).round()
    return (codes.double() * (top / limit).double()).flatten(1)


def check(case: Case, bits: int, x: torch.Tensor) -> torch.Tensor:
    got = case.matrix.multiply(x)
    bias = 0 if case.bias is None else case.bias.double()
    exact = x.double() @ case.weight.T + bias
    near = rounded(x, LIMITS[bits]) @ case.weight.T + bias
    size = x.double().abs() @ case.magnitude.T + 1e-30
    # Against the same rounded activations only float32 sums differ.
    assert ((got.double() - near).abs() <= 2e-6 * size + 1e-6).all()
    # Against float activations: half a step each.
    top = x.unflatten(1, (-1, BLOCK)).abs().amax(-1).double()
    step = (top / LIMITS[bits]).repeat_interleave(BLOCK, 1)
    bound = 0.5 * step @ case.weight.abs().T
    assert ((got.double() - exact).abs() <= 1.001 * bound + 2e-6 * size + 1e-6).all()
    return got


@pytest.mark.parametrize(("kind", "bits"), VARIANTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (33, 64), (7, 96), (160, 576)])
def test_products(
    level: str, kind: BlockKind, bits: int, bias: bool, outputs: int, inputs: int
) -> None:
    case = make_case(kind, bits, outputs, inputs, bias)
    generator = torch.Generator().manual_seed(inputs)
    for rows in (1, 2, 3, 4, 5, 9, 33):
        check(case, bits, torch.randn(rows, inputs, generator=generator))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    variant=st.sampled_from(VARIANTS),
    level=st.sampled_from(available_levels() or ("portable",)),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 6),
    rows=st.integers(0, 200),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 9),
)
def test_any_shape(
    variant: tuple[BlockKind, int],
    level: str,
    outputs: int,
    blocks: int,
    rows: int,
    scale: float,
    threads: int,
    seed: int,
) -> None:
    kind, bits = variant
    case = make_case(kind, bits, outputs, blocks * BLOCK, seed=seed)
    x = scale * torch.randn(rows, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    if rows > 2:
        x[1] = 0
        x[2, BLOCK // 2 :] = 0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    force_level(level)
    try:
        got = check(case, bits, x) if rows else case.matrix.multiply(x)
    finally:
        force_level(None)
        torch.set_num_threads(before)
    assert got.shape == (rows, outputs)
    if rows > 2:
        assert torch.equal(got[1], torch.zeros(outputs))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "bits"), VARIANTS)
def test_a_row_is_the_same_in_any_batch_and_on_any_threads(
    level: str, threads: None, kind: BlockKind, bits: int
) -> None:
    matrix = make_case(kind, bits, 200, 576, bias=True).matrix
    x = torch.randn(150, 576, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(1)
    alone = torch.cat([matrix.multiply(row[None]) for row in x])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for rows in (2, 3, 4, 5, 7, 64, 150):
            assert torch.equal(matrix.multiply(x[:rows]), alone[:rows])


def test_levels_agree(threads: None) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    for kind, bits in VARIANTS:
        matrix = make_case(kind, bits, 48, 96).matrix
        results = []
        for name in available_levels():
            force_level(name)
            results.append(matrix.multiply(x))
        force_level(None)
        for result in results[1:]:
            assert torch.allclose(result, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("kind", "bits"), VARIANTS)
def test_what_is_no_number_spoils_its_own_row(
    level: str, kind: BlockKind, bits: int, value: float
) -> None:
    matrix = make_case(kind, bits, 16, 64).matrix
    x = torch.ones(3, 64)
    x[1, 40] = value
    got = matrix.multiply(x)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_norm_gate_and_residual_are_part_of_a_product(level: str) -> None:
    matrix = make_case(BlockKind.Q4, 16, 37, 96, bias=True).matrix
    generator = torch.Generator().manual_seed(3)
    weight, x, wide, residual = (
        torch.randn(shape, generator=generator) for shape in (96, (5, 96), (5, 192), (5, 37))
    )
    x[1], wide[2] = 1e-3 * x[1], 30 * wide[2]
    x[3] = 0
    normed = F.rms_norm(x, (96,), weight, 1e-5)
    gated = F.silu(wide[:, :96]) * wide[:, 96:]
    for rows in (1, 5):
        for prepared, source, expected in (
            (None, x, x),
            (Input.normed(weight, 1e-5), x, normed),
            (Input.gated(96), wide, gated),
        ):
            got = matrix.multiply(source[:rows], prepared, residual[:rows])
            want = matrix.multiply(expected[:rows]) + residual[:rows]
            assert torch.allclose(got, want, rtol=1e-4, atol=2e-3)


def test_rotate() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 5, 16, generator=generator)
    angles = torch.randn(4, 1, 8, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :8], x[..., 8:]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    assert torch.allclose(rotate(x, cos, sin), expected, atol=1e-6)
    assert torch.allclose(rotate(x[:, 1:4], cos, sin), expected[:, 1:4], atol=1e-6)
    assert torch.allclose(rotate(x.mT.contiguous().mT, cos, sin), expected, atol=1e-6)
    assert rotate(x[:0], cos[:0], sin[:0]).shape == (0, 5, 16)


@pytest.mark.parametrize("kind", list(BlockKind))
def test_rows(kind: BlockKind) -> None:
    case = make_case(kind, 16, 50, 96)
    index = torch.tensor([49, 0, 17, 17])
    expected = case.weight[index].float()
    assert torch.allclose(case.matrix.rows(index), expected, rtol=1e-6, atol=1e-6)
    assert case.matrix.rows(index[:0]).shape == (0, 96)
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match="of the 50 there are"):
            case.matrix.rows(torch.tensor([3, wrong]))


def test_bad_input_is_refused() -> None:
    data = torch.zeros(panel_bytes(BlockKind.Q4, 64), dtype=torch.uint8)
    matrix = BlockMatrix(BlockKind.Q4, 16, 64, data)
    for x in (torch.zeros(2, 32), torch.zeros(64), torch.zeros(2, 64, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="float32"):
            matrix.multiply(x)
    with pytest.raises(ValueError, match="64 prepared inputs for a matrix of 32"):
        make_case(BlockKind.Q4, 16, 16, 32).matrix.multiply(torch.zeros(1, 64), matrix.plain)
    with pytest.raises(ValueError, match="residual"):
        matrix.multiply(torch.zeros(2, 64), residual=torch.zeros(2, 15))
    with pytest.raises(ValueError, match="no Q8"):
        BlockMatrix(BlockKind.Q8, 16, 64, data)
    with pytest.raises(ValueError, match="16 bits"):
        BlockMatrix(BlockKind.Q8, 16, 32, torch.zeros(576, dtype=torch.uint8), None, 8)
    with pytest.raises(ValueError, match="bias"):
        BlockMatrix(BlockKind.Q4, 16, 64, data, torch.zeros(15))
    with pytest.raises(ValueError, match="multiples of 32 inputs, not 48"):
        pack(np.zeros((4, 48), np.uint8), np.zeros((4, 1), np.float16), np.zeros((4, 1)))
