"""Quantised weights: each layer against its own dequantised matrix, GGUF blocks, whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from models_support import WIDE, DenseAttention, make_reference, run_batch, save_reference
from tiny_llama import write_tiny_llama

from minima_kernels.cpu.library import native_library
from minima_kernels.cpu.linear import BLOCK, BlockKind, BlockMatrix, pack
from sglang_minima.models import quantization
from sglang_minima.models.causal_lm import DecoderLayer
from sglang_minima.models.errors import ModelLoadError, UnsupportedModel
from sglang_minima.models.fused import FusedLayer
from sglang_minima.models.gguf_blocks import (
    BLOCKS_FILE,
    BlockArrays,
    gguf_blocks,
    module_blocks,
    save_blocks,
)
from sglang_minima.models.layers import Linear
from sglang_minima.models.loader import load_model
from sglang_minima.models.quantization import (
    BlockLinear,
    Float16Linear,
    Quantization,
    QuantizedLinear,
    fastest,
    supported,
)
from sglang_minima.models.weight_blocks import (
    Panels,
    has_blocks,
    load_panels,
    round_to_q4,
    round_to_q8,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP16 = supported("fp16", CPU, torch.float32)
needs_fp16 = pytest.mark.skipif(not FP16.ok, reason=FP16.reason)
needs_native = pytest.mark.skipif(native_library() is None, reason="no native kernels")
CHOICES: list[Any] = [
    pytest.param("fp16", marks=needs_fp16),
    pytest.param("int8", marks=needs_native),
    pytest.param("int4", marks=needs_native),
]


def make_linear(outputs: int = 64, inputs: int = 96, bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(outputs + inputs)
    linear = Linear(inputs, outputs, bias)
    linear.weight.copy_(torch.randn(outputs, inputs, generator=generator))
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(outputs, generator=generator))
    return linear


def quantized(choice: str, source: Linear) -> QuantizedLinear:
    if choice == "fp16":
        return Float16Linear(source)
    rounded = round_to_q8 if choice == "int8" else round_to_q4
    return BlockLinear(source, rounded(source.weight), 16 if choice == "int8" else 8)


def values(panels: Panels, outputs: int, inputs: int) -> torch.Tensor:
    """float32 [outputs, inputs]"""
    return BlockMatrix(panels.kind, outputs, inputs, panels.data).rows(torch.arange(outputs))


def arrays_of(value: float, outputs: int, inputs: int, kind: BlockKind) -> BlockArrays:
    """Blocks of a matrix full of one small integer."""
    codes = np.full((outputs, inputs), value)
    halves = np.ones((outputs, inputs // BLOCK), np.float16)
    if kind == BlockKind.Q8:
        return BlockArrays(codes.astype(np.int8), halves, None)
    return BlockArrays(codes.astype(np.uint8), halves, 0 * halves)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_products_are_those_of_the_dequantised_matrix(
    choice: str, bias: bool, dtype: torch.dtype, rows: int
) -> None:
    source = make_linear(bias=bias)
    layer = quantized(choice, source)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).to(dtype)
    got = layer(x)
    expected = F.linear(x.float(), layer.dequantized(), source.bias)
    assert got.dtype == dtype
    error = (got.float() - expected).norm() / expected.norm()
    limit = 0.015 if choice == "int4" else 1e-3
    assert error < limit + (0 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize(
    ("choice", "limit"),
    [
        pytest.param("fp16", 3e-4, marks=needs_fp16),
        pytest.param("int8", 0.006, marks=needs_native),
        pytest.param("int4", 0.1, marks=needs_native),
    ],
)
def test_dequantised_matrix_is_close_to_the_source(choice: str, limit: float) -> None:
    source = make_linear()
    error = quantized(choice, source).dequantized() - source.weight
    assert error.norm() / source.weight.norm() < limit


@needs_native
@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_a_row_of_zeros_stays_zero(choice: str) -> None:
    source = make_linear()
    source.weight[3] = 0
    assert torch.equal(quantized(choice, source)(torch.randn(2, 96))[:, 3], torch.zeros(2))


@pytest.mark.parametrize("choice", CHOICES)
def test_rows_are_those_of_the_matrix(choice: str) -> None:
    source = make_linear()
    layer = quantized(choice, source) if choice != "fp16" else Float16Linear(source, keep_rows=True)
    assert isinstance(layer, BlockLinear | Float16Linear)
    index = torch.tensor([5, 0, 63, 5])
    assert torch.allclose(layer.rows(index, torch.float32), layer.dequantized()[index])


@needs_native
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 1.0, 30.0]))
@settings(max_examples=20)
def test_gguf_blocks_map_exactly(kind: Kind, seed: int, scale: float) -> None:
    floats = np.random.default_rng(seed).standard_normal((8, 128)).astype(np.float32) * scale
    raw = gguf.quants.quantize(floats, kind)
    arrays = gguf_blocks(kind.name, raw)
    assert arrays is not None
    expected = gguf.quants.dequantize(raw, kind)
    got = values(Panels(BlockKind[arrays.kind], torch.from_numpy(pack(*arrays))), 8, 128)
    # The same products and sums of the same float16 numbers, in float32.
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6 * scale)


def test_other_encodings_have_no_blocks() -> None:
    raw = gguf.quants.quantize(np.ones((2, 64), np.float32), Kind.Q5_1)
    assert gguf_blocks("Q5_1", raw) is None


def test_blocks_are_those_of_modules() -> None:
    """Fused modules have the blocks of their parts, in order, if all have the same kind."""
    q4, q8 = BlockKind.Q4, BlockKind.Q8
    blocks = {
        "a.v_proj.weight": arrays_of(3, 2, 32, q8),
        "a.q_proj.weight": arrays_of(1, 4, 32, q8),
        "a.k_proj.weight": arrays_of(2, 2, 32, q8),
        "a.gate_proj.weight": arrays_of(1, 2, 32, q4),
        "a.up_proj.weight": arrays_of(1, 2, 32, q8),
        "b.q_proj.weight": arrays_of(1, 2, 32, q8),
        "b.up_proj.weight": arrays_of(1, 2, 32, q8),
        "lm_head.weight": arrays_of(5, 2, 64, q4),
    }
    found = dict(module_blocks(blocks))
    assert set(found) == {"a.qkv_proj", "lm_head"}
    assert found["a.qkv_proj"].codes[:, 0].tolist() == [1, 1, 1, 1, 2, 2, 3, 3]
    assert found["a.qkv_proj"].minima is None
    assert found["lm_head"].minima is not None


def test_blocks_survive_their_file(tmp_path: Path) -> None:
    assert not has_blocks(tmp_path)
    assert load_panels(tmp_path) == {}
    save_blocks(tmp_path, {})
    assert not has_blocks(tmp_path)
    kept = {
        "a.down_proj": arrays_of(3, 20, 96, BlockKind.Q4),
        "lm_head": arrays_of(-7, 17, 32, BlockKind.Q8),
    }
    save_blocks(tmp_path, {f"{name}.weight": arrays for name, arrays in kept.items()})
    loaded = load_panels(tmp_path)
    assert has_blocks(tmp_path)
    assert set(loaded) == set(kept)
    for name, arrays in kept.items():
        assert loaded[name].kind.name == arrays.kind
        assert torch.equal(loaded[name].data, torch.from_numpy(pack(*arrays)).view(-1))


def test_blocks_that_are_cut_are_named(tmp_path: Path) -> None:
    save_blocks(tmp_path, {"lm_head.weight": arrays_of(1, 16, 32, BlockKind.Q8)})
    path = tmp_path / BLOCKS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=f"{path} cannot be read: "):
        load_panels(tmp_path)


@needs_native
@given(
    groups=st.lists(
        st.lists(st.floats(-100, 100, width=16), min_size=BLOCK, max_size=BLOCK),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=50)
def test_grouped_rounding_errs_by_half_a_level(groups: list[list[float]]) -> None:
    weight = torch.tensor(groups).view(1, -1)
    error = (values(round_to_q4(weight), *weight.shape) - weight).abs().view(-1, BLOCK)
    parts = weight.view(-1, BLOCK)
    level = (parts.amax(1) - parts.amin(1)) / 15
    # 15 steps of a scale rounded to float16, and a rounded minimum.
    slack = 1e-2 * level + 1e-3 * parts.abs().amax(1) + 1e-5
    assert (error.amax(1) <= level / 2 + slack).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        seed=3,
        vocab_size=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_is_close_to_the_float_one(
    checkpoint: Path, choice: Quantization, dtype: torch.dtype
) -> None:
    ids = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    exact, _ = load_model(checkpoint, torch.float32)
    (expected,) = run_batch(exact, DenseAttention(), {0: ids})
    model, _ = load_model(checkpoint, dtype, quantization=choice)
    assert not any(isinstance(module, Linear) for module in model.modules())
    (got,) = run_batch(model, DenseAttention(), {0: ids})
    assert got.dtype == torch.float32
    error = ((got - expected).norm() / expected.norm()).item()
    limit = {"fp16": 2e-3, "int8": 0.03, "int4": 0.25}[choice]
    assert 0 < error < limit + (0.02 if dtype == torch.bfloat16 else 0)


@needs_native
@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3"])
def test_fused_layers_compute_the_same(tmp_path: Path, name: str) -> None:
    make_reference(name, **WIDE).save_pretrained(tmp_path)
    ids = torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    model, _ = load_model(tmp_path, torch.float32, quantization="int8")
    assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
    (got,) = run_batch(model, DenseAttention(), {0: ids})
    for index, fused in enumerate(model.model.layers):
        parts = DecoderLayer(model.config, fused.get_submodule("self_attn"))
        for child, part in fused.named_children():
            setattr(parts, child, part)
        model.model.layers[index] = parts
    (expected,) = run_batch(model, DenseAttention(), {0: ids})
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@needs_native
@pytest.mark.parametrize("choice", ["int4", "gguf"])
def test_blocks_of_the_checkpoint_are_used(
    checkpoint: Path, tmp_path: Path, choice: Quantization
) -> None:
    """Fused matrices take the blocks of their parts; what has no blocks is rounded."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rows = [64, 32, 32]
    blocks = {
        name: arrays_of(index + 1, count, 64, BlockKind.Q4)
        for index, (name, count) in enumerate(zip(names, rows, strict=True))
    }
    save_blocks(tmp_path, blocks)
    model, _ = load_model(tmp_path, torch.float32, quantization=choice)
    layer = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer, BlockLinear)
    expected = torch.repeat_interleave(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(rows))
    assert torch.equal(layer.dequantized(), expected[:, None].expand(128, 64))
    other = model.get_submodule("model.layers.1.self_attn.qkv_proj")
    if choice == "int4":
        assert isinstance(other, BlockLinear)
    else:
        assert isinstance(other, Float16Linear if FP16.ok else Linear)


@needs_native
def test_biases_are_loaded_beside_blocks(tmp_path: Path) -> None:
    reference = make_reference("qwen2", **WIDE)
    reference.save_pretrained(tmp_path)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rows = (64, 32, 32)
    save_blocks(
        tmp_path,
        {n: arrays_of(0, count, 64, BlockKind.Q8) for n, count in zip(names, rows, strict=True)},
    )
    model, _ = load_model(tmp_path, torch.float32, quantization="gguf")
    layer = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer, BlockLinear)
    attention = reference.model.layers[0].self_attn
    biases = [attention.get_submodule(f"{part}_proj").bias for part in "qkv"]
    with torch.no_grad():
        assert torch.equal(layer(torch.ones(1, 64))[0], torch.cat(biases))


@needs_native
@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_shapes_that_blocks_cannot_hold_are_named(tmp_path: Path, choice: Quantization) -> None:
    save_reference("llama", tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"{choice} .* multiples of 32 inputs; .* has 48"):
        load_model(tmp_path, torch.float32, quantization=choice)


def test_what_runs_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: tuple[Quantization, ...] = ("fp16", "int8", "int4", "gguf")
    for choice in choices:
        assert "CPU only" in supported(choice, CUDA, torch.bfloat16).reason
        assert not supported(choice, CPU, torch.float16).ok
    assert supported("none", CUDA, torch.float16).ok
    floats = "fp16" if FP16.ok else "none"
    assert fastest(CUDA, torch.bfloat16, tmp_path) == "none"
    assert fastest(CPU, torch.bfloat16, tmp_path) == "none"
    assert fastest(CPU, torch.float32, tmp_path) == floats
    save_blocks(tmp_path, {"lm_head.weight": arrays_of(1, 16, 32, BlockKind.Q8)})
    if native_library() is not None:
        assert supported("gguf", CPU, torch.float32, tmp_path).ok
        assert "no GGUF" in supported("gguf", CPU, torch.float32, tmp_path.parent).reason
        assert fastest(CPU, torch.float32, tmp_path) == "gguf"
    monkeypatch.setattr(quantization, "native_library", lambda: None)
    for choice in choices[1:]:
        assert "native kernels" in supported(choice, CPU, torch.float32, tmp_path).reason
    assert fastest(CPU, torch.float32, tmp_path) == floats
