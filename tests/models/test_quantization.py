"""Quantised weights: each layer against its own dequantised matrix, GGUF blocks, whole models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from models_support import DenseAttention, run_batch, save_reference
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_minima.models.errors import UnsupportedModel
from sglang_minima.models.gguf_blocks import GROUP, gguf_blocks, save_blocks
from sglang_minima.models.layers import Linear
from sglang_minima.models.loader import load_model
from sglang_minima.models.quantization import (
    INT4_ROWS,
    INT8_ROWS,
    Float16Linear,
    Int4Linear,
    Int8Linear,
    Quantization,
    QuantizedLinear,
    fastest,
    supported,
)
from sglang_minima.models.weight_blocks import Blocks, group_blocks, load_blocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP16 = supported("fp16", CPU, torch.float32)
needs_fp16 = pytest.mark.skipif(not FP16.ok, reason=FP16.reason)
CHOICES = [pytest.param("fp16", marks=needs_fp16), "int8", "int4"]


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
    return Int8Linear(source) if choice == "int8" else Int4Linear(source, "layer", None)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, INT8_ROWS, INT8_ROWS + 1, INT4_ROWS, INT4_ROWS + 1, 100])
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
    exact = choice == "fp16" and dtype == torch.float32
    assert error < (1e-3 if exact else 6e-3)


@pytest.mark.parametrize(
    ("choice", "limit"),
    [pytest.param("fp16", 3e-4, marks=needs_fp16), ("int8", 0.01), ("int4", 0.1)],
)
def test_dequantised_matrix_is_close_to_the_source(choice: str, limit: float) -> None:
    source = make_linear()
    error = quantized(choice, source).dequantized() - source.weight
    assert error.norm() / source.weight.norm() < limit


def test_a_row_of_zeros_stays_zero() -> None:
    source = make_linear()
    source.weight[3] = 0
    for layer in (Int8Linear(source), Int4Linear(source, "layer", None)):
        assert torch.equal(layer(torch.randn(2, 96))[:, 3], torch.zeros(2))


@pytest.mark.parametrize("make", [Int8Linear, pytest.param(Float16Linear, marks=needs_fp16)])
def test_rows_are_those_of_the_matrix(make: type[Int8Linear] | type[Float16Linear]) -> None:
    source = make_linear()
    layer = Float16Linear(source, keep_rows=True) if make is Float16Linear else make(source)
    index = torch.tensor([5, 0, 63, 5])
    assert torch.allclose(layer.rows(index, torch.float32), layer.dequantized()[index])


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 1.0, 30.0]))
@settings(max_examples=20, deadline=None)
def test_gguf_blocks_map_exactly(kind: Kind, seed: int, scale: float) -> None:
    values = np.random.default_rng(seed).standard_normal((8, 128)).astype(np.float32) * scale
    raw = gguf.quants.quantize(values, kind)
    arrays = gguf_blocks(kind.name, raw)
    assert arrays is not None
    blocks = Blocks(*(torch.from_numpy(arrays[part]) for part in Blocks._fields))
    expected = gguf.quants.dequantize(raw, kind)
    # The same products and sums of the same float16 numbers, in float32.
    np.testing.assert_allclose(blocks.values().numpy(), expected, rtol=1e-6, atol=1e-6 * scale)


def test_other_encodings_have_no_blocks() -> None:
    raw = gguf.quants.quantize(np.ones((2, 64), np.float32), Kind.Q8_0)
    assert gguf_blocks("Q8_0", raw) is None


def test_blocks_survive_their_file(tmp_path: Path) -> None:
    blocks = group_blocks(torch.randn(4, 2 * GROUP))
    arrays = {part: getattr(blocks, part).numpy() for part in Blocks._fields}
    save_blocks(tmp_path, {"a.weight": arrays})
    loaded = load_blocks(tmp_path)
    assert list(loaded) == ["a.weight"]
    for kept, original in zip(loaded["a.weight"], blocks, strict=True):
        assert torch.equal(kept, original)
    assert load_blocks(tmp_path / "elsewhere") == {}


@given(
    groups=st.lists(
        st.lists(st.floats(-100, 100, width=16), min_size=GROUP, max_size=GROUP),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=50, deadline=None)
def test_grouped_rounding_errs_by_half_a_level(groups: list[list[float]]) -> None:
    weight = torch.tensor(groups).view(1, -1)
    error = (group_blocks(weight).values() - weight).abs().view(-1, GROUP)
    parts = weight.view(-1, GROUP)
    level = (parts.amax(1) - parts.amin(1)) / 15
    # 15 steps of a scale rounded to float16, and a rounded minimum.
    slack = 1e-2 * level + 1e-3 * parts.abs().amax(1) + 1e-5
    assert (error.amax(1) <= level / 2 + slack).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


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


def test_blocks_of_the_checkpoint_are_used(checkpoint: Path, tmp_path: Path) -> None:
    """Fused matrices take the blocks of their parts, in the order of the parts."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rows = [64, 32, 32]
    blocks = {}
    for index, (name, count) in enumerate(zip(names, rows, strict=True)):
        made = group_blocks(torch.full((count, 64), float(index + 1)))
        blocks[name] = {part: getattr(made, part).numpy() for part in Blocks._fields}
    save_blocks(tmp_path, blocks)
    model, _ = load_model(tmp_path, torch.float32, quantization="int4")
    layer = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer, Int4Linear)
    expected = torch.repeat_interleave(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(rows))
    assert torch.equal(layer.dequantized(), expected[:, None].expand(128, 64))


def test_shapes_that_int4_cannot_hold_are_named(tmp_path: Path) -> None:
    save_reference("llama", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"int4 .* has 48 and 80"):
        load_model(tmp_path, torch.float32, quantization="int4")


def test_what_runs_where() -> None:
    for choice in ("fp16", "int8", "int4"):
        assert "CPU only" in supported(choice, CUDA, torch.bfloat16).reason
        assert not supported(choice, CPU, torch.float16).ok
    assert supported("none", CUDA, torch.float16).ok
    assert fastest(CUDA, torch.bfloat16) == "none"
    assert fastest(CPU, torch.bfloat16) == "none"
    assert fastest(CPU, torch.float32) == ("fp16" if FP16.ok else "none")
