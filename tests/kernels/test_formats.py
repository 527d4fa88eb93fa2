"""Round trips of every format against what theory promises, and the meaning of its bytes."""

from __future__ import annotations

import pytest
import torch

from minima_kernels import BF16, F16, F32, FP8, TQ, TQ3, Format, KVGeometry, parse_format
from minima_kernels.formats import AppendableFormat
from minima_kernels.formats.fp8 import MIN_SCALE, expand_codes

GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=2, head_dim=128, page_size=64)

# Mean squared error per squared norm measured on Gaussian rows of 128 channels, norm-corrected
# from five levels on; it lies a little off Lloyd–Max theory, which has no per-row scale.
MEASURED_128 = {
    16: 0.0092,
    8: 0.0338,
    7: 0.0432,
    6: 0.0574,
    5: 0.0797,
    4: 0.1160,
    3: 0.1885,
    2: 0.3615,
}

APPENDABLE = [BF16, F16, F32, FP8]


def pages(count: int, geometry: KVGeometry = GEOMETRY, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = count, geometry.page_size, geometry.num_kv_heads, geometry.head_dim
    return torch.randn(shape, generator=generator)


def round_trip(
    format_: Format, k: torch.Tensor, v: torch.Tensor, geometry: KVGeometry = GEOMETRY
) -> tuple[torch.Tensor, torch.Tensor]:
    data = format_.encode(k, v, geometry)
    assert data.dtype == torch.uint8
    assert data.shape == (len(k), format_.layer_bytes(geometry))
    decoded = format_.decode(data, geometry)
    assert decoded[0].shape == decoded[1].shape == k.shape
    assert decoded[0].dtype == decoded[1].dtype == torch.float32
    return decoded


def distortion(decoded: torch.Tensor, exact: torch.Tensor) -> float:
    return float((decoded - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("format_", [BF16, F16, F32])
def test_raw_formats_are_exact_in_their_dtype(format_: Format) -> None:
    k, v = pages(3), pages(3, seed=1)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format_.name]
    k_decoded, v_decoded = round_trip(format_, k, v)
    assert torch.equal(k_decoded, k.to(dtype).float())
    assert torch.equal(v_decoded, v.to(dtype).float())


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 3e4])
def test_fp8_error_is_that_of_three_mantissa_bits(magnitude: float) -> None:
    k, v = pages(4) * magnitude, pages(4, seed=1) * magnitude
    for decoded, exact in zip(round_trip(FP8, k, v), (k, v), strict=True):
        error = (decoded - exact).abs()
        # Half a step of three mantissa bits, or half the smallest step that the scale leaves.
        scale = (exact.abs().amax(-1, keepdim=True) / 448).clamp_min(MIN_SCALE)
        assert bool((error <= exact.abs() * 2**-4 * 1.01 + scale * 2**-10 * 1.01).all())
        assert distortion(decoded, exact) < 0.03**2


def test_fp8_rows_of_unlike_magnitude_do_not_disturb_each_other() -> None:
    k = pages(1) * torch.logspace(-3, 3, 64)[None, :, None, None]
    decoded, _ = round_trip(FP8, k, k)
    per_row = (decoded - k).norm(dim=-1) / k.norm(dim=-1)
    assert float(per_row.max()) < 0.05


def test_fp8_codes_expand_as_torch_casts_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    is_number = ~expected.isnan()
    assert torch.equal(expand_codes(codes)[is_number] * 256, expected[is_number])


@pytest.mark.parametrize("format_", [FP8, TQ3, TQ(16, 4), TQ(2, 3), TQ(8, 8, centred=False)])
def test_zero_and_tiny_rows_are_safe(format_: Format) -> None:
    zeros = torch.zeros_like(pages(1))
    for decoded in round_trip(format_, zeros, zeros):
        assert torch.equal(decoded, zeros)
    tiny = pages(1) * 1e-9
    for decoded in round_trip(format_, tiny, tiny):
        assert float(decoded.abs().max()) < 1e-6


@pytest.mark.parametrize(("levels", "expected"), MEASURED_128.items())
def test_tq_distortion_is_that_of_theory(levels: int, expected: float) -> None:
    k, v = pages(8, seed=levels), pages(8, seed=levels + 100)
    k_decoded, v_decoded = round_trip(TQ(levels, levels, centred=False), k, v)
    assert distortion(v_decoded, v) == pytest.approx(expected, rel=0.03)
    assert distortion(k_decoded, k) == pytest.approx(expected, rel=0.03)


def test_tq_level_counts_of_keys_and_values_are_independent() -> None:
    k, v = pages(4), pages(4, seed=1)
    k_decoded, v_decoded = round_trip(TQ(16, 4), k, v)
    assert distortion(k_decoded, k) == pytest.approx(MEASURED_128[16], rel=0.06)
    assert distortion(v_decoded, v) == pytest.approx(MEASURED_128[4], rel=0.03)


@pytest.mark.parametrize("levels", [5, 8, 16])
def test_norm_correction_keeps_norms(levels: int) -> None:
    v = pages(2)
    _, decoded = round_trip(TQ(levels, levels), v, v)
    assert torch.allclose(decoded.norm(dim=-1), v.norm(dim=-1), rtol=1e-3)


def test_centring_takes_a_constant_component_out_of_the_error() -> None:
    noise = pages(8)
    constant = pages(1, seed=1)[:, :1] * 4
    k = noise + constant
    centred, _ = round_trip(TQ3, k, k)
    plain, _ = round_trip(TQ(8, 8, centred=False), k, k)
    error = float((centred - k).square().mean() / noise.square().mean())
    # As if the component were not there; the mean itself takes 1 / 64 of the noise with it.
    assert error == pytest.approx(MEASURED_128[8] * 63 / 64, rel=0.03)
    assert float((plain - k).square().mean()) > 5 * float((centred - k).square().mean())


def test_equal_keys_decode_to_their_mean() -> None:
    k = pages(1)[:, :1].expand(1, 64, 2, 128)
    decoded, _ = round_trip(TQ3, k, k)
    assert torch.allclose(decoded, k, atol=3e-3)


def test_errors_of_pages_do_not_depend_on_their_batch() -> None:
    k, v = pages(5), pages(5, seed=1)
    together = TQ3.encode(k, v, GEOMETRY)
    for index in range(5):
        alone = TQ3.encode(k[index : index + 1], v[index : index + 1], GEOMETRY)
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("format_", APPENDABLE, ids=lambda format_: format_.name)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_appending_all_tokens_gives_the_encoded_page(
    format_: AppendableFormat, page_size: int, head_dim: int
) -> None:
    geometry = KVGeometry(1, 3, head_dim, page_size)
    k, v = pages(2, geometry), pages(2, geometry, seed=1)
    encoded = format_.encode(k, v, geometry)
    size = format_.layer_bytes(geometry)
    arena = torch.zeros(4 * size, dtype=torch.uint8)
    order = torch.randperm(2 * page_size, generator=torch.Generator().manual_seed(2))
    starts = torch.tensor([2 * size, 0])[order // page_size]
    format_.append(
        arena, starts, order % page_size, k.flatten(0, 1)[order], v.flatten(0, 1)[order], geometry
    )
    assert torch.equal(arena[2 * size : 3 * size], encoded[0])
    assert torch.equal(arena[:size], encoded[1])
    assert not arena[size : 2 * size].any()
    assert not arena[3 * size :].any()


@pytest.mark.parametrize("format_", APPENDABLE, ids=lambda format_: format_.name)
def test_appending_leaves_other_tokens_alone(format_: AppendableFormat) -> None:
    size = format_.layer_bytes(GEOMETRY)
    arena = format_.encode(pages(1), pages(1, seed=1), GEOMETRY).flatten()
    before = format_.decode(arena[None], GEOMETRY)
    row_k, row_v = torch.ones(1, 2, 128), torch.full((1, 2, 128), 2.0)
    format_.append(arena, torch.tensor([0]), torch.tensor([7]), row_k, row_v, GEOMETRY)
    after = format_.decode(arena.view(1, size), GEOMETRY)
    others = torch.arange(64) != 7
    for old, new, row in zip(before, after, (1.0, 2.0), strict=True):
        assert torch.equal(new[:, others], old[:, others])
        assert torch.allclose(new[:, 7], torch.full((1, 2, 128), row), rtol=1e-3)


def test_appending_no_tokens_changes_nothing() -> None:
    arena = torch.full((FP8.layer_bytes(GEOMETRY),), 0xFF, dtype=torch.uint8)
    none = torch.empty(0, dtype=torch.int64)
    FP8.append(arena, none, none, torch.empty(0, 2, 128), torch.empty(0, 2, 128), GEOMETRY)
    assert bool((arena == 0xFF).all())


@pytest.mark.parametrize(
    "name", ["bf16", "f16", "f32", "fp8", "tq3", "tq(16,4)", "tq(5,7)", "tq(8,8,uncentred)"]
)
def test_names_parse_to_their_format(name: str) -> None:
    format_ = parse_format(name)
    assert format_.name == name
    assert parse_format(format_.name) == format_
    assert hash(parse_format(format_.name)) == hash(format_)


def test_names_are_forgiving() -> None:
    assert parse_format(" TQ(16, 4) ") == TQ(16, 4)
    assert parse_format("tq(8,8)") == TQ3
    assert TQ(8, 8) == TQ3 != TQ(8, 8, centred=False)


@pytest.mark.parametrize("name", ["", "fp4", "tq", "tq(8)", "tq(1,8)", "tq(8,17)", "tq(8,8,x)"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        parse_format(name)


GOLDEN_GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, page_size=2)
GOLDEN_K = [[1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 0.0, 3.5], [0.0] * 8]
GOLDEN_V = [[0.25] * 8, [-4.0, 4.0, -4.0, 4.0, -4.0, 4.0, -4.0, 4.0]]
GOLDEN = {
    "fp8": (
        "70f078f868e8007e0000000000000000"  # K codes: 128, -128, 256, -256, 64, -64, 0, 448
        "7e7e7e7e7e7e7e7efe7efe7efe7efe7e"  # V codes: 448; -448 and 448 in turn
        "0020000492109220"  # scales: K 2**-7 and 2**-14 (smallest), V 0.25 / 448 and 4 / 448
        "0000000000000000"  # padding
    ),
    "tq3": (
        "95c3ed6a3c0e0000"  # K codes, lowest bits first: 5 2 6 1 4 3 3 7, 2 5 1 6 3 4 3 0
        "6ddbb6aaaaaa0000"  # V codes: eight times 5; 2 and 5 in turn
        "2d3a2d3a3f353f45"  # scales: K 0.772 twice, V 0.328 and 5.25
        "0000000000000000"  # padding
        "003800b8003c00bc003400b40000003f"  # mean: half of the first key
    ),
}


def golden_page(name: str) -> str:
    k, v = torch.tensor(GOLDEN_K)[None, :, None], torch.tensor(GOLDEN_V)[None, :, None]
    return bytes(parse_format(name).encode(k, v, GOLDEN_GEOMETRY)[0].tolist()).hex()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    assert golden_page(name) == GOLDEN[name]
