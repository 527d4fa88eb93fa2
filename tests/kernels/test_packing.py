"""Mixed-radix packing: density, identity, and the canonical bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minima_kernels.codebook import codebook
from minima_kernels.packing import dequantise, pack, stream_bytes, unpack, unpack_words, word_shape

LEVELS = st.integers(2, 16)


@pytest.mark.parametrize(
    ("levels", "shape"),
    [(2, (8, 8)), (3, (5, 8)), (4, (4, 8)), (5, (3, 7)), (6, (5, 13)), (8, (4, 12)), (16, (2, 8))],
)
def test_word_shapes(levels: int, shape: tuple[int, int]) -> None:
    assert word_shape(levels) == shape


@pytest.mark.parametrize("levels", range(2, 17))
def test_words_hold_their_codes_and_are_the_densest(levels: int) -> None:
    codes, bits = word_shape(levels)
    assert levels**codes <= 2**bits
    densest = min(
        math.ceil(n * math.log2(levels) - 1e-9) / n
        for n in range(1, 19)
        if math.ceil(n * math.log2(levels) - 1e-9) <= 18
    )
    assert bits / codes == pytest.approx(densest)


@settings(max_examples=200)
@given(levels=LEVELS, num_codes=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
def test_unpack_undoes_pack(levels: int, num_codes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, levels, (3, num_codes), generator=generator)
    stream = pack(codes, levels)
    assert stream.dtype == torch.uint8
    assert stream.shape == (3, stream_bytes(levels, num_codes))
    assert torch.equal(unpack(stream, levels, num_codes), codes.int())


@settings(max_examples=100)
@given(levels=LEVELS, num_codes=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
def test_dequantise_is_the_codebook_of_the_codes(levels: int, num_codes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, levels, (2, num_codes), generator=generator)
    values = dequantise(pack(codes, levels), levels, num_codes)
    assert torch.equal(values, codebook(levels, torch.device("cpu")).centroids[codes])


@settings(max_examples=50)
@given(levels=LEVELS, num_codes=st.integers(1, 400), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_expand_to_levels(levels: int, num_codes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = stream_bytes(levels, num_codes)
    stream = torch.randint(0, 256, (2, size), generator=generator, dtype=torch.uint8)
    stream[1] = 0xFF
    words = unpack_words(stream, levels, num_codes)
    assert int(words.min()) >= 0 and int(words.max()) < 2 ** word_shape(levels).bits
    values = dequantise(stream, levels, num_codes)
    assert torch.isin(values, codebook(levels, torch.device("cpu")).centroids).all()


@pytest.mark.parametrize("levels", range(2, 17))
def test_padding_is_negligible_on_a_page(levels: int) -> None:
    codes, bits = word_shape(levels)
    num_codes = 64 * 64
    assert stream_bytes(levels, num_codes) <= math.ceil(num_codes / codes) * bits / 8 + 4


GOLDEN = {
    # Bits of three: 0, 1, ... 7 lowest first is 0xFAC688.
    8: ([0, 1, 2, 3, 4, 5, 6, 7], "88c6fa00"),
    # Low nibble first.
    16: ([1, 2, 3, 15], "21f30000"),
    4: ([0, 1, 2, 3, 3], "e4030000"),
    # 1 + 3 * 2 + 9 * 0 + 27 * 1 + 81 * 2 = 196; the second word is 2.
    3: ([1, 2, 0, 1, 2, 2], "c4020000"),
    # 4 + 5 * 3 + 25 * 2 = 69 in bits 0 to 6, 1 in bits 7 to 13.
    5: ([4, 3, 2, 1], "c5000000"),
    # 6^5 - 1 = 7775 in bits 0 to 12, then 5 in bits 13 to 25.
    6: ([5, 5, 5, 5, 5, 5], "5fbe0000"),
    # 7^6 - 1 = 117648 in bits 0 to 16, then 3 in bits 17 to 33.
    7: ([6, 6, 6, 6, 6, 6, 3], "90cb070000000000"),
    2: ([1, 0, 0, 0, 0, 0, 0, 1, 1], "81010000"),
}


@pytest.mark.parametrize("levels", GOLDEN)
def test_golden_bytes(levels: int) -> None:
    codes, expected = GOLDEN[levels]
    stream = pack(torch.tensor(codes), levels)
    assert bytes(stream.tolist()).hex() == expected
    assert unpack(stream, levels, len(codes)).tolist() == codes


def test_words_of_eight_levels_cross_integers_as_bits_do() -> None:
    codes = torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(1))
    number = sum(int(code) << 3 * i for i, code in enumerate(codes))
    assert bytes(pack(codes, 8).tolist()) == number.to_bytes(24, "little")
