"""The order of TQ codes on a GPU, against the operands that the kernels make of the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minima_kernels import TQ, KVGeometry, PageKind, parse_format, read_page, retier
from minima_kernels.codebook import codebook
from minima_kernels.cpu.route import torch_only
from minima_kernels.cuda.order import (
    CODE_BITS,
    FragmentOrder,
    fragment_order,
    page_order,
    supports,
)
from minima_kernels.cuda.variants import decode_variant

LEVELS = [(8, 8), (16, 4), (16, 8), (8, 4), (4, 4)]
DIMS = [64, 128, 256]


def encoded(format_: TQ, geometry: KVGeometry, pages: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = pages, geometry.page_size, geometry.num_kv_heads, geometry.head_dim
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    return format_.encode(k, v, geometry)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("centred", [True, False])
def test_any_bytes_go_there_and_back(levels: tuple[int, int], dim: int, centred: bool) -> None:
    geometry = KVGeometry(1, 2, dim, 64)
    format_ = TQ(*levels, centred=centred)
    order = fragment_order(format_, geometry)
    size = format_.layer_bytes(geometry)
    data = torch.randint(0, 256, (2, size), dtype=torch.uint8)
    there = order.from_canonical(data)
    assert there.shape == data.shape and not torch.equal(there, data)
    assert torch.equal(order.to_canonical(there), data)
    assert torch.equal(order.from_canonical(order.to_canonical(data)), data)


@settings(max_examples=20)
@given(st.integers(0, 4), st.integers(0, 2**31))
def test_it_is_a_permutation_of_bits(which: int, seed: int) -> None:
    geometry = KVGeometry(1, 1, 64, 64)
    format_ = TQ(*LEVELS[which])
    order = fragment_order(format_, geometry)
    generator = torch.Generator().manual_seed(seed)
    size = 1, format_.layer_bytes(geometry)
    a = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    b = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)

    def ones(x: torch.Tensor) -> int:
        return int(np.unpackbits(x.numpy()).sum())

    # A map of bits to bits that keeps their number and commutes with "or" moves each bit somewhere.
    assert ones(order.from_canonical(a)) == ones(a)
    assert torch.equal(
        order.from_canonical(a | b), order.from_canonical(a) | order.from_canonical(b)
    )


def test_golden_bits() -> None:
    """Places worked out by hand from the description in the module."""
    geometry = KVGeometry(1, 1, 64, 64)

    def place(format_: TQ, token: int, channel: int, bit: int, part: str) -> tuple[int, int]:
        layout = format_.layout(geometry)
        codes = layout.k_codes if part == "k" else layout.v_codes
        bits = CODE_BITS[format_.k_levels if part == "k" else format_.v_levels]
        at = (token * 64 + channel) * bits + bit
        data = torch.zeros(1, format_.layer_bytes(geometry), dtype=torch.uint8)
        data[0, codes.offset + at // 8] = 1 << at % 8
        moved = fragment_order(format_, geometry).from_canonical(data)[0]
        byte = int(moved.nonzero())
        return byte, int(moved[byte]).bit_length() - 1

    # Token 0, channel 0 of K: group 0, lane 0, register 0: nibble 0 of word 0.
    assert place(TQ(8, 8), 0, 0, 0, "k") == (0, 0)
    assert place(TQ(8, 8), 0, 0, 2, "k") == (0, 2)
    # Token 9 = row 1 of the second half: lane 4, register 1; channel 1 is nibble 5 of word 0, whose
    # chunk holds words 0 to 3 of the lane.
    assert place(TQ(8, 8), 9, 1, 0, "k") == (4 * 16 + 2, 4)
    # Channels 48.. of token 0: k-step 1, second half: register 6, kept in the top bits of words.
    assert place(TQ(8, 8), 0, 48, 0, "k") == (0, 3)
    assert place(TQ(8, 8), 0, 48, 1, "k") == (4, 3)
    # Token 16: group 1, words 3 to 5; word 3 is the last of chunk 0.
    assert place(TQ(8, 8), 16, 0, 0, "k") == (12, 0)
    # The lowest bit of a four-bit code is on top of its nibble.
    assert place(TQ(16, 4), 0, 0, 0, "k") == (0, 3)
    assert place(TQ(16, 4), 0, 0, 3, "k") == (0, 2)
    # V of TQ(8, 4) behind 1,536 bytes of K codes, 128 of scales, 128 of mean. Channel 0, token 8 is
    # byte 2 of register 0; token 16 is register 2, above register 0.
    values = 1536 + 128 + 128
    assert place(TQ(8, 4), 8, 0, 0, "v") == (values + 1, 0)
    assert place(TQ(8, 4), 16, 0, 0, "v") == (values, 2)


def prmt(low: int, high: int, selector: np.ndarray) -> np.ndarray:
    """The byte permutation of the GPU, with its sign mode: uint32 [...] to int8 [..., 4]."""
    table = np.array([*low.to_bytes(4, "little"), *high.to_bytes(4, "little")], dtype=np.uint8)
    nibbles = np.stack([selector >> 4 * i & 15 for i in range(4)], axis=-1)
    chosen = table[nibbles & 7].astype(np.int8)
    return np.where(nibbles & 8, chosen >> 7, chosen)


def operands(words: np.ndarray, tables: Sequence[int]) -> np.ndarray:
    """What ``unpack`` of tq_decode.cu makes of words [..., bits]: integers [..., 8, 4]."""
    bits = words.shape[-1]
    registers: list[np.ndarray] = [np.empty(0)] * 8
    if bits == 2:
        for i in range(2):
            for half in range(2):
                s = words[..., i] >> 2 * half & 0x33333333
                registers[4 * i + 2 * half] = prmt(tables[0], 0, s)
                registers[4 * i + 2 * half + 1] = prmt(tables[0], 0, s >> 16)
    elif bits == 3:
        last = words[..., 0] >> 3 & 0x11111111 | words[..., 1] >> 2 & 0x22222222
        last = last | words[..., 2] >> 1 & 0x44444444
        for i in range(4):
            s = words[..., i] & 0x77777777 if i < 3 else last
            registers[2 * i] = prmt(tables[0], tables[1], s)
            registers[2 * i + 1] = prmt(tables[0], tables[1], s >> 16)
    else:
        for i in range(4):
            s, t = words[..., i], words[..., i] ^ 0x88888888
            for half in range(2):
                first = prmt(tables[0], tables[1], s >> 16 * half).astype(np.int32)
                registers[2 * i + half] = first + prmt(tables[2], tables[3], t >> 16 * half)
    return np.stack(registers, axis=-2).astype(np.int32)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("levels", LEVELS)
def test_operands_are_the_codebook_values(levels: tuple[int, int], dim: int) -> None:
    geometry = KVGeometry(1, 2, dim, 64)
    format_ = TQ(*levels)
    data = encoded(format_, geometry, pages=1)
    k, v = format_.decode(data, geometry)
    order = fragment_order(format_, geometry)
    share = order.from_canonical(data)[0].numpy()
    macros = dict(decode_variant(format_, geometry, 15).macros)
    lane, register, byte = np.ogrid[:32, :8, :4]
    for head in range(2):
        blob = share[head * order.head_bytes : (head + 1) * order.head_bytes]
        at = 0
        for part, levels_of_part, expected in (("K", levels[0], k), ("V", levels[1], v)):
            bits = CODE_BITS[levels_of_part]
            size = 8 * dim * bits
            chunks = blob[at : at + size].view(np.uint32).reshape(-1, 32, 4)
            words = chunks.transpose(1, 0, 2).reshape(32, dim // 16, bits)
            tables = [
                int(str(macros[f"{part}_{name}"])[:-1], 16) for name in ("T0", "T1", "U0", "U1")
            ]
            codes = operands(words, tables)
            values = np.zeros((64, dim), dtype=np.int32)
            for group in range(dim // 16):
                # Operand A of m16n8k32: register a holds row 8 (a & 1) + lane / 4, four columns
                # from 16 (a >> 1) + 4 (lane % 4).
                row = 8 * (register & 1) + lane // 4
                if part == "K":
                    tile, block = divmod(group, dim // 64)
                    column = 64 * block + 32 * (register >> 2) + 16 * (register >> 1 & 1)
                    values[16 * tile + row, column + 4 * (lane % 4) + byte] = codes[:, group]
                else:
                    # Rows are channels. Columns are tokens in the order in which the transposed
                    # weights come: of 16 tokens, 2j, 2j + 1, 2j + 8, 2j + 9.
                    token = 16 * (register >> 1) + 8 * (byte >> 1) + 2 * (lane % 4) + (byte & 1)
                    values[token, 16 * group + row] = codes[:, group]
            at += size
            scales = blob[at : at + 128].view(np.float16).astype(np.float32)
            at += 128
            token = np.arange(64)
            scale = scales[token % 8 * 8 + token // 16 * 2 + token % 16 // 8]
            step = float(str(macros[f"{part}_STEP"])[:-1])
            got = values * step * scale[:, None]
            if part == "K":
                got = got + blob[at : at + 2 * dim].view(np.float16).astype(np.float32)
                at += 2 * dim
            assert np.abs(got - expected[0, :, head].numpy()).max() < 1e-5
        assert at == order.head_bytes


@pytest.mark.parametrize("levels", [4, 8, 16])
def test_tables_hold_the_codebook(levels: int) -> None:
    """Every code of a level count, not only those that random rows happen to choose."""
    macros = dict(decode_variant(TQ(levels, 4), KVGeometry(1, 1, 64, 64), 15).macros)
    tables = [int(str(macros[f"K_{name}"])[:-1], 16) for name in ("T0", "T1", "U0", "U1")]
    codes = torch.arange(levels)
    nibble = (codes >> 1 | (codes & 1) << 3) if levels == 16 else codes
    selector = nibble.numpy().astype(np.uint32)
    got = prmt(tables[0], tables[1], selector)[:, 0].astype(np.int32)
    if levels == 16:
        got = got + prmt(tables[2], tables[3], selector ^ 8)[:, 0]
    step = float(str(macros["K_STEP"])[:-1])
    expected = codebook(levels, torch.device("cpu")).centroids.numpy()
    assert np.allclose(got * step, expected, atol=1e-6)
    assert got[-1] == 127


def test_where_the_order_applies() -> None:
    geometry = KVGeometry(1, 2, 64, 64)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert page_order(TQ(8, 8), geometry, cpu) is None
    assert page_order(TQ(8, 8), geometry, cuda) is not None
    for name in ("fp8", "bf16", "tq(5,3)"):
        assert page_order(parse_format(name), geometry, cuda) is None
    assert not supports(TQ(8, 8), KVGeometry(1, 2, 96, 64))
    assert not supports(TQ(8, 8), KVGeometry(1, 2, 64, 16))


def test_every_reader_and_writer_of_pages_goes_through_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, with the order switched on for this arena."""
    geometry = KVGeometry(2, 2, 64, 64)
    fp8 = PageKind.uniform("recent", parse_format("fp8"), 2)
    tq = PageKind.uniform("stale", parse_format("tq3"), 2).with_layers(parse_format("fp8"), [0])
    calls: list[FragmentOrder | None] = []

    def everywhere(format_: TQ, geometry: KVGeometry, device: torch.device) -> FragmentOrder | None:
        found = fragment_order(format_, geometry) if supports(format_, geometry) else None
        calls.append(found)
        return found

    monkeypatch.setattr("minima_kernels.shares.page_order", everywhere)
    sizes = fp8.granules(geometry), tq.granules(geometry)
    arena = torch.zeros((2 * sizes[0] + sizes[1]) * 128, dtype=torch.uint8)
    places = 0, sizes[0], sizes[0] + sizes[1]
    k = torch.randn(1, 64, 2, 64)
    v = torch.randn(1, 64, 2, 64)
    data = parse_format("fp8").encode(k, v, geometry)[0]
    for layer in range(2):
        start = fp8.layer_offset(layer, geometry)
        arena[start : start + len(data)] = data
    with torch_only():
        retier(arena, [places[0]], fp8, [places[1]], tq, geometry)
        stored = arena[places[1] * 128 + tq.layer_offset(1, geometry) :]
        decoded = read_page(arena, places[1], tq, 1, geometry)
        retier(arena, [places[1]], tq, [places[2]], fp8, geometry)
    assert any(calls)
    source = parse_format("fp8").decode(data[None], geometry)
    expected = TQ(8, 8).encode(*source, geometry)
    order = fragment_order(TQ(8, 8), geometry)
    assert torch.equal(stored[: expected.shape[1]], order.from_canonical(expected)[0])
    assert torch.equal(decoded[0], TQ(8, 8).decode(expected, geometry)[0][0])
    again = read_page(arena, places[2], fp8, 1, geometry)
    assert (again[0] - decoded[0]).abs().max() < 0.2
